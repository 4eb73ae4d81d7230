"""`mjax dedup` and `mjax clean`: what goes and what stays, reports that add up, and the same bytes or none."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mjax.commands.clean import CleanArguments, clean, cut, evaluation_grams
from mjax.commands.dedup import DedupArguments, DedupJob, dedup
from mjax.errors import RunError, UsageError
from tests.conftest import ROOT

COMMANDS = {dedup: DedupArguments, clean: CleanArguments}


def lines(file, texts, key="text"):
    file.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return file


def read(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def run(command, folder, texts=None, **options):
    """The report of `command` on `texts`, or on `inputs`; and the documents that stay."""
    inputs = options.pop("inputs", None) or (lines(folder / "in.jsonl", texts),)
    options = {"workers": 1, "overwrite": True, "output": folder / "out.jsonl", **options}
    report = command(COMMANDS[command](inputs=inputs, **options))
    return report, read(folder / "out.jsonl")


def retained_indices(folder, texts, **options):
    """The numbers of the documents that `mjax dedup` keeps."""
    return [document["id"] for document in run(dedup, folder, texts, **options)[1]]


def cleaned(folder, texts, **options):
    return run(clean, folder, texts, **{"min_tokens": 0, **options})


def outputs(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("out")}


def step(report, name):
    (found,) = [each for each in [*report.get("changed", ()), *report["removed"]] if each["name"] == name]
    return found


# --- Deduplication ----------------------------------------------------------------------------------------------------

STORY = "It was a bright cold day in April and the clocks were striking thirteen as Winston Smith slipped through"
CHINESE = "一九八四年四月四日的白天晴朗而寒冷钟敲了十三下温斯顿史密斯为了躲避寒风紧缩着脖子很快地溜进了胜利大厦的玻璃门"


def test_first_of_equal_texts_stays_with_its_fields(tmp_path):
    """JSON escapes what UTF-8 cannot say: an unpaired surrogate in another field."""
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first, second = '{"n": 1.5, "text": "é"}\n', '{"text": "b", "x": [null], "title": "\\ud83d"}\n'
    file.write_text(first + second + '{"text": "\\u00e9", "n": 2}\n{"text": "b"}\n')
    run(dedup, tmp_path, inputs=(file,), exact=True)
    assert out.read_text() == first + second
    removed = [(each["source"], each["kept"]) for each in read(tmp_path / "out.removed.jsonl")]
    assert removed == [(f"{file}:3", f"{file}:1"), (f"{file}:4", f"{file}:2")]


@pytest.mark.parametrize(
    ("texts", "options", "expected"),
    [
        (["a b c d e f", "A b c d e f", "a b c d e f "], {"exact": True}, [0, 1, 2]),
        ([STORY, STORY.upper() + "!!!", STORY.replace(" ", ", ")], {}, [0]),
        (["yes", "Yes!", "no", "yes yes", "", "", "…", "...", " "], {}, [0, 2, 3, 4, 6, 7, 8]),
        ([CHINESE, CHINESE.replace("寒冷", "温暖"), CHINESE[::-1]], {"shingles": "characters"}, [0, 2]),
    ],
    ids=["exact", "case and punctuation", "short texts", "characters"],
)
def test_similar_texts_go(tmp_path, texts, options, expected):
    assert retained_indices(tmp_path, texts, **options) == expected


def test_pair_at_the_threshold_goes(tmp_path):
    words = [f"w{number}" for number in range(100)]
    for common, stays in ((70, [0]), (69, [0, 1])):
        assert retained_indices(tmp_path, [" ".join(words[:common]), " ".join(words)], shingle_size=1) == stays


def test_duplicate_of_a_duplicate_goes_with_its_story(tmp_path):
    words = [f"w{number}" for number in range(140)]
    texts = [" ".join(words[20 * i : 20 * i + 100]) for i in range(3)]  # neighbours: 80 of 120; ends: 60 of 140
    assert retained_indices(tmp_path, [*texts, texts[2]], shingle_size=1, threshold=0.6) == [0]
    sources = [f"{tmp_path}/in.jsonl:{number}" for number in range(1, 5)]
    near = {"reason": "near-duplicate", "kept": sources[0], "jaccard": 0.6667}
    assert read(tmp_path / "out.removed.jsonl") == [
        {"source": sources[1], **near, "similar_to": sources[0]},
        {"source": sources[2], **near, "similar_to": sources[1]},
        {"source": sources[3], **near, "similar_to": sources[2], "reason": "exact duplicate", "jaccard": 1.0},
    ]


@pytest.fixture
def mixed(tmp_path):
    """Families of similar texts, equal ones, short ones, in two files."""
    random, texts = np.random.default_rng(0), ["", "", "few words", "few words"]
    for family in range(30):
        for _ in range(6):
            words = [f"f{family}w{number}" for number in range(100)]
            words[random.integers(100)] = f"x{random.integers(4)}"
            texts.append(" ".join(words))
    texts = [texts[number] for number in random.permutation(len(texts))]
    return lines(tmp_path / "a.jsonl", texts[:100]), lines(tmp_path / "b.jsonl", texts[100:])


def test_dedup_report_adds_up(mixed, tmp_path):
    report, documents = run(dedup, tmp_path, inputs=mixed)
    assert report == json.loads((tmp_path / "out.report.json").read_text())
    given, removed = [one for file in mixed for one in read(file)], read(tmp_path / "out.removed.jsonl")
    exact, near = report["removed"]
    assert report["read"]["documents"] == len(given) == 184
    assert report["kept"]["documents"] == len(documents) == 32
    assert exact["documents"] + near["documents"] == len(removed) == 184 - 32
    assert exact["documents"] == len(given) - len({document["text"] for document in given})
    assert report["read"]["bytes"] == exact["bytes"] + near["bytes"] + report["kept"]["bytes"]
    assert sum(report["near_duplicates"]["removed_by_jaccard"].values()) == near["documents"]


# --- Cleaning ---------------------------------------------------------------------------------------------------------

QUESTION = "which of these fifteen words in a row belongs to no language that anybody living speaks"
SENTENCE = "Rain fell on the roofs and nobody in the long street came to a window. "
LONG = SENTENCE * 12


@pytest.fixture
def questions(tmp_path):
    """Options that cut out QUESTION."""
    file = lines(tmp_path / "questions.jsonl", [QUESTION], key="question")
    return {"decontaminate": (file,), "decontaminate_key": "question"}


@pytest.fixture
def hooks(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(
        "def no_rain(text):\n    return 'rain' not in text\n"
        "def forgetful(text):\n    len(text)\n"
        "def fails(text):\n    return text[99]\n"
    )
    return file


def test_broken_unicode_is_repaired(tmp_path):
    report, documents = cleaned(tmp_path, ["It donâ€™t work, cafÃ©", "naïve 漢字 don't", "&lt;b&gt; &amp; ﬁne"])
    assert [one["text"] for one in documents] == ["It don't work, café", "naïve 漢字 don't", "<b> & fine"]
    assert step(report, "repaired")["documents"] == 2
    assert cleaned(tmp_path, ["donâ€™t"], repair=False)[1] == [{"id": 0, "text": "donâ€™t"}]


def test_documents_below_128_words_are_removed(tmp_path):
    texts = ["w " * 127, "w " * 128, "", " " * 5000 + "w " * 127, " " * 5000 + "w " * 128]
    report, documents = cleaned(tmp_path, texts, min_tokens=128)
    assert [one["id"] for one in documents] == [1, 4]
    assert step(report, "fewer than 128 words")["documents"] == 3
    texts = ["é" * length for length in (9, 10, 11, 159, 160, 161, 1000)]  # two bytes each
    _, documents = cleaned(tmp_path, texts, min_tokens=20, tokenizer="bytes")
    assert [one["id"] for one in documents] == [1, 2, 3, 4, 5, 6]


def test_evaluation_text_is_cut_out(tmp_path, questions):
    """Pieces say where they are from, and have to be long enough as well."""
    source = f"{tmp_path / 'in.jsonl'}:2"
    _, documents = cleaned(tmp_path, [LONG, f"{LONG}{QUESTION}. {LONG}"], **questions)
    assert documents == [
        {"id": 0, "text": LONG},
        {"id": 1, "text": (SENTENCE * 9)[:-1], "split_id": f"{source}-0000"},
        {"id": 1, "text": " " + SENTENCE * 9, "split_id": f"{source}-0001"},
    ]
    text = f"{LONG}{QUESTION}. {SENTENCE * 7} sun"
    assert len(cleaned(tmp_path, [text], **questions, min_tokens=100)[1]) == 1
    (removed,) = read(tmp_path / "out.removed.jsonl")
    assert (removed["split_id"][-7:], removed["reason"]) == (":1-0001", "fewer than 100 words")


def test_documents_of_eleven_pieces_are_removed(tmp_path, questions):
    """Documents of evaluation text alone are removed, too."""
    ten, eleven = (f"{LONG}{QUESTION}. " * cuts + LONG for cuts in (9, 10))
    report, documents = cleaned(tmp_path, [QUESTION, ten, eleven], **questions, common=1000)
    assert [one["id"] for one in documents] == [1] * 10
    assert step(report, "nothing left beside evaluation text")["documents"] == 1
    assert step(report, "cut into more than 10 pieces")["documents"] == 1


def test_runs_met_ten_times_are_common_phrases(tmp_path, questions):
    text = f"{LONG}{QUESTION}. {LONG}"
    assert len(cleaned(tmp_path, [text] * 9, **questions)[1]) == 18
    _, documents = cleaned(tmp_path, [text] * 10, **questions)
    assert [one["text"] for one in documents] == [text] * 10


def test_pieces_are_those_of_the_original():
    """The expected number comes from Megatron's filter_ngrams.py, whose rule was restated word by word to compute
    it."""
    found = []
    for seed in range(30):
        random, words, parts = np.random.default_rng(seed), [f"w{number}" for number in range(50)], []
        evaluation = [" ".join(random.choice(words, random.integers(5, 25))) for _ in range(12)]
        for _ in range(random.integers(1, 40)):
            if random.random() < 0.2:
                text = evaluation[random.integers(len(evaluation))]
                separator = random.choice([" ", ", ", "\n", " - - "])
                parts.append(text.upper() if random.random() < 0.5 else text.replace(" ", separator))
            else:
                parts.append(random.choice([" ", ". "]).join(random.choice(words, random.integers(1, 60))))
            parts.append(random.choice([". ", " ", "? ", "!", "\n\n", ".\n"]))
        found.append(cut("".join(parts), evaluation_grams(evaluation))[0])
    assert hashlib.sha256(str(found).encode()).hexdigest()[:16] == "f7bbdd49086f25f3"


def test_pieces_of_200_characters_go_too():
    grams = evaluation_grams([QUESTION])
    exactly = "x" * 199 + "."
    for before, stays in ((exactly, False), ("x" + exactly, True)):
        text = before + "z" * 200 + " " + QUESTION + "y" * 210 + "." + "w" * 150
        assert cut(text, grams)[0] == ([before] if stays else [])


def test_longer_lower_case_does_not_shift_a_cut():
    text = "İ" * 300 + ". " + SENTENCE * 10 + QUESTION + ". " + SENTENCE * 10
    plain, grams = "I" * 300 + text[300:], evaluation_grams([QUESTION])
    assert [len(piece) for piece in cut(text, grams)[0]] == [len(piece) for piece in cut(plain, grams)[0]]


@pytest.fixture
def everything(tmp_path, questions, hooks):
    """Each step changes or removes 20 documents of 120."""
    texts = ["donâ€™t", QUESTION, f"{LONG}{QUESTION}. {LONG}", LONG + "rain", LONG, f"{LONG}{QUESTION}. " * 10 + LONG]
    options = {"filter": (f"{hooks}:no_rain",), "min_tokens": 50, "common": 10**6}
    return {"inputs": (lines(tmp_path / "in.jsonl", texts * 20),), **questions, **options}


def test_clean_report_adds_up(tmp_path, everything):
    report, documents = run(clean, tmp_path, **everything)
    assert report == json.loads((tmp_path / "out.report.json").read_text())
    removed = sum(each["documents"] for each in report["removed"])
    assert removed == len(read(tmp_path / "out.removed.jsonl"))
    pieces = step(report, "more pieces by that")["documents"]
    assert report["read"]["documents"] + pieces - removed == report["kept"]["documents"] == len(documents)
    assert all(each["documents"] == 20 for each in report["changed"] + report["removed"])
    assert report["kept"]["bytes"] == sum(len(one["text"].encode()) for one in documents)
    assert max(len(each["examples"]) for each in report["removed"]) == 10


# --- Both: the same bytes, or none ------------------------------------------------------------------------------------


def test_changing_input_is_noticed(mixed, tmp_path, monkeypatch):
    def changing(*arguments):
        lines(mixed[0], ["only one"])
        return share(*arguments)

    share = DedupJob.share
    monkeypatch.setattr(DedupJob, "share", changing)
    with pytest.raises(RunError, match=r"a\.jsonl changed while it was read; run the same command again"):
        run(dedup, tmp_path, inputs=mixed)


@pytest.mark.parametrize("command", COMMANDS)
def test_malformed_line_stops_or_is_counted(tmp_path, command):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\noops\n{"text": "a"}\n{"body": "b"}\n')
    inputs = (tmp_path / "in.jsonl",)
    with pytest.raises(UsageError, match=r"in\.jsonl:2: .*--malformed skip"):
        run(command, tmp_path, inputs=inputs)
    assert outputs(tmp_path) == {}
    report, _ = run(command, tmp_path, inputs=inputs, malformed="skip")
    assert report["malformed"]["documents"] == 2
    assert "in.jsonl:2: " in report["malformed"]["examples"][0]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (dedup, {"output": Path("out.txt")}, r"--output out\.txt is not a \.jsonl file; give one such as out\.jsonl"),
        (dedup, {"output": Path("in.jsonl"), "overwrite": True}, r"would overwrite the input in\.jsonl; choose anoth"),
        (dedup, {"output": Path("there.jsonl")}, r"there\.jsonl exists; choose another --output, or add --overwrite"),
        (clean, {"decontaminate": (Path("in.jsonl"),)}, "--decontaminate in.jsonl has no text of 8 words or more"),
        (clean, {"filter": ("hooks.py:number",)}, "hooks.py has no function 'number'; it has .*no_rain"),
        (clean, {"filter": ("hooks.py:forgetful",), "min_tokens": 0}, "returned None for .*:1; .* True or False"),
    ],
)
def test_impossible_filter_is_rejected_and_leaves_nothing(tmp_path, monkeypatch, hooks, command, options, message):
    monkeypatch.chdir(tmp_path)
    lines(Path("in.jsonl"), ["a"])
    Path("there.jsonl").write_text("precious")
    with pytest.raises((UsageError, RunError), match=message):
        command(COMMANDS[command](**{"inputs": (Path("in.jsonl"),), "output": Path("out.jsonl"), **options}))
    left = sorted(file.name for file in tmp_path.iterdir() if file.name != "__pycache__")
    assert left == ["hooks.py", "in.jsonl", "there.jsonl"]


def test_text_is_prepared_without_jax():
    modules = "commands.dedup, mjax.commands.clean, mjax.commands.prepare, mjax.data.samples, mjax.data.batches"
    code = f"import sys, mjax.{modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
