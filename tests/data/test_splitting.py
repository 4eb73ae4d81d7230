"""One text file can be trained: the sentences that refuse its dataset say what to type, and that works."""

import re

import pytest
import tyro

from mjax.commands.prepare import PrepareArguments, prepare
from mjax.commands.train import TrainArguments
from mjax.config import Config, DataConfig, GPTConfig, TrainConfig
from mjax.data.corpus import split_documents
from mjax.data.sources import open_data
from mjax.errors import UsageError

PARAGRAPH = "It was the best of times,\nit was the worst of times.\n"


def test_documents_know_the_line_they_begin_at():
    assert split_documents("\n\na\nb\n\n  \n\n c\n", "blank-line") == [(3, "a\nb"), (8, " c")]
    assert split_documents("a\nb\n\n\nc", "2") == [(1, "a\nb"), (5, "c")]
    assert split_documents("", "blank-line") == split_documents("\n\n", "1") == []


def _ways_out(sentence: str, paragraphs: bool) -> list[tuple[list[str], list[str]]]:
    """What a sentence says to type, each as flags of prepare and flags of training."""
    found = []
    for flag, number, overwrite in re.findall(r"again with (--split-documents) (\d+) (--overwrite)", sentence):
        found += [([flag, number, overwrite], []), *([([flag, "blank-line", overwrite], [])] if paragraphs else [])]
    flags = re.findall(r"--train\.eval-interval 0|--data\.split [\d,]+|--model\.sequence \d+", sentence)
    return found + [([], written.split()) for written in flags]


def _opens(file, preparing: list[str], training: list[str], tries: int) -> None:
    """Prepare and open; where a sentence refuses it, each of the ways out that it names leads on."""
    prefix = str(file.with_suffix(""))
    prepare(tyro.cli(PrepareArguments, args=[str(file), "--output", prefix, "--tokenizer", "bytes", *preparing]))
    default = Config(
        model=GPTConfig(sequence=64, vocabulary=257),
        data=DataConfig(path=(prefix,)),
        train=TrainConfig(steps=4, global_batch=4, micro_batch=1, eval_batches=1),
    )
    config = tyro.cli(TrainArguments, args=training, default=TrainArguments(settings=default)).settings
    sentence = ""
    try:
        open_data(config)
    except UsageError as error:
        sentence = str(error)
    ways = _ways_out(sentence, "\n\n" in file.read_text() and "blank-line" not in preparing)
    assert bool(ways) == bool(sentence), sentence
    assert tries or not ways, sentence
    for again, flags in ways:
        _opens(file, again or preparing, [*training, *flags], tries - 1)


@pytest.mark.parametrize(
    "text",
    [PARAGRAPH.replace("\n", " \n\n") * 200, PARAGRAPH * 300, PARAGRAPH * 3, PARAGRAPH * 2 + "\n" + PARAGRAPH],
    ids=["paragraphs", "lines", "a few lines", "two paragraphs"],
)
def test_one_text_file_is_trained_by_typing_what_the_sentences_say(tmp_path, text):
    (tmp_path / "book.txt").write_text(text)
    _opens(tmp_path / "book.txt", ["--overwrite"], [], tries=4)


def test_ten_documents_are_split_by_typing_what_the_sentence_says(tmp_path):
    (tmp_path / "book.txt").write_text((PARAGRAPH * 3 + "\n") * 7)
    _opens(tmp_path / "book.txt", ["--overwrite", "--split-documents", "blank-line"], [], tries=1)
