"""Small sets of every task with labels, in its published format, that a tiny model learns in seconds.

A single word tells the answer: which relation, whether two questions are the same, which option is right, where an
answer is. All words are in `VOCABULARY`, a few dozen pieces. The same arguments write the same bytes.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

from mjax.data.tokenizers import BertTokenizer, load_tokenizer

FILLERS = [
    *["the", "a", "red", "old", "small", "river", "house", "bird", "tree", "stone"],
    *["walks", "sings", "sleeps", "near", "under", "over", "we", "they", "saw", "found"],
]
RELATIONS = {"contradiction": "never", "entailment": "indeed", "neutral": "perhaps"}
SAME = {1: "again", 0: "else"}
RIGHT = "gold"
NAMES, SURNAMES = ["anna", "boris", "clara", "david"], ["king", "lopez", "meyer"]
MARKS = [".", "?", "_"]
WORDS = [*FILLERS, *RELATIONS.values(), *SAME.values(), RIGHT, *NAMES, *SURNAMES, "who", "came", "what", "is", *MARKS]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]

MNLI_COLUMNS = [
    *["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"],
    *["sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"],
]


class TaskFiles(NamedTuple):
    """Arguments of `open_task`."""

    train: list[str]
    validation: list[str]
    tokenizer: BertTokenizer


def tokenizer_of(folder: Path, vocabulary=VOCABULARY) -> BertTokenizer:
    """The tokenizer whose pieces are `vocabulary`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary), encoding="utf-8")
    return load_tokenizer(f"bert-uncased:{folder / 'vocab.txt'}")


def write_task(folder: Path, name: str, train: int = 256, validation: int = 64, seed: int = 0) -> TaskFiles:
    """Write a task's files of `train` and `validation` examples; two validation sets get half each."""
    tokenizer = tokenizer_of(folder)
    draw = random.Random(f"{name} {seed}")
    files = WRITERS[name](folder, draw, train, validation)
    return TaskFiles(*([str(file) for file in of_role] for of_role in files), tokenizer)


def sentence(draw: random.Random, *words: str, length: int = 5) -> str:
    """Fillers, with `words` somewhere among them."""
    chosen = draw.choices(FILLERS, k=length)
    for word in words:
        chosen.insert(draw.randrange(len(chosen) + 1), word)
    return " ".join(chosen)


def _table(file: Path, header: list[str], rows: list[tuple]) -> Path:
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in (header, *rows)), encoding="utf-8")
    return file


def _mnli(folder: Path, draw: random.Random, train: int, validation: int):
    def row(index: int) -> tuple:
        label = draw.choice(list(RELATIONS))
        first, second = sentence(draw), sentence(draw, RELATIONS[label])
        parses = [f"( {first} )", f"( {second} )", f"(ROOT {first})", f"(ROOT {second})"]
        return (index, 1, f"{index}e", "fiction", *parses, first, second, label, label)

    def write(name: str, count: int) -> Path:
        return _table(folder / name, MNLI_COLUMNS, [row(index) for index in range(count)])

    dev = [write(f"dev_{kind}.tsv", validation // 2) for kind in ("matched", "mismatched")]
    return [write("train.tsv", train)], dev


def _qqp(folder: Path, draw: random.Random, train: int, validation: int):
    def row(index: int) -> tuple:
        label = draw.randrange(2)
        questions = f"what is {sentence(draw)} ?", f"what is {sentence(draw, SAME[label])} ?"
        return (index, 2 * index, 2 * index + 1, *questions, label)

    def write(name: str, count: int) -> Path:
        header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
        return _table(folder / name, header, [row(index) for index in range(count)])

    return [write("train.tsv", train)], [write("dev.tsv", validation)]


def _race(folder: Path, draw: random.Random, train: int, validation: int):
    def write(part: str, level: str, count: int) -> None:
        (folder / part / level).mkdir(parents=True)
        for number, start in enumerate(range(0, count, 4)):
            answers = draw.choices("ABCD", k=min(4, count - start))
            passage = {
                "id": f"{level}{number}.txt",
                "article": f"{sentence(draw, length=8)} .\n{sentence(draw, length=8)} .",
                "questions": [draw.choice(["what is _ ?", "who came ?"]) for _ in answers],
                "options": [
                    [sentence(draw, *([RIGHT] if letter == right else []), length=2) for letter in "ABCD"]
                    for right in answers
                ],
                "answers": answers,
            }
            file = folder / part / level / f"{number}.txt"
            file.write_text(json.dumps(passage), encoding="utf-8")

    for part, count in (("train", train), ("dev", validation)):
        for level in ("middle", "high"):
            write(part, level, count // 2)
    return [folder / "train"], [folder / "dev"]


def _squad(version: str):
    def write(folder: Path, draw: random.Random, train: int, validation: int):
        def part(name: str, count: int) -> Path:
            file = folder / f"{name}-v{version}.json"
            paragraphs = [_paragraph(draw, f"{name}{number}", version) for number in range(count)]
            data = [{"title": "Who", "paragraphs": paragraphs}]
            file.write_text(json.dumps({"version": f"v{version}", "data": data}), encoding="utf-8")
            return file

        return [part("train", train)], [part("dev", validation)]

    return write


def _paragraph(draw: random.Random, name: str, version: str):
    who = f"{draw.choice(NAMES)} {draw.choice(SURNAMES)}"
    if version == "2.0" and draw.random() < 0.4:
        question = {"answers": [], "is_impossible": True, "plausible_answers": []}
        context = sentence(draw, length=12)
    else:
        context = sentence(draw, who, length=10)
        question = {"answers": [{"text": who, "answer_start": context.index(who)}], "is_impossible": False}
    return {"context": context, "qas": [{"id": name, "question": "who came ?", **question}]}


WRITERS = {"mnli": _mnli, "qqp": _qqp, "race": _race, "squad1.1": _squad("1.1"), "squad2.0": _squad("2.0")}
