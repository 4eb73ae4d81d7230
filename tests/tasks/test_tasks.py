"""Windows that tasks make of their files, and metrics they compute from scores, without a model."""

import json
import math

import numpy as np
import pytest

from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import RunError, UsageError
from mjax.tasks.interface import Score
from mjax.tasks.zero_shot import Lambada, Perplexity, WikiText103, detokenize, token_ratio

BYTES = ByteTokenizer()


def values(task, *scores):
    return {metric.name: metric.value for metric in task.metrics(scores)}


def labels_of(window):
    return bytes(window.tokens[len(window.tokens) - window.counted :].tolist()).decode()


def whole(window):
    return bytes(window.tokens.tolist()).decode()


def written(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


# --- WikiText103 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("the dogs ' tails", "the dogs' tails"),
        ("state @-@ of @-@ the @-@ art", "state-of-the-art"),
        ("1 @,@ 000 @.@ 5 metres", "1,000.5 metres"),
        ("He said : no ; yes . Now ! What ? So , fine", "He said: no; yes. Now! What? So, fine"),
        ("a ( b c ) d [ e ] f { g }", "a (b c) d [e] f {g}"),
        ('the " best song " of 1990', 'the "best song" of 1990'),
        (" = Robert = \n \n = = Career = = \n = = = Early = = = \n", " = Robert =\n\n== Career ==\n=== Early ===\n"),
        ("20 ° C", "20°C"),
        ("N of N and N people", "N of 1 and 1 people"),
        ("Boulter 's role", "Boulter's role"),
        ("/' 7/", "/'[0-9]/"),
        ('No change (here), "at" all\'s', 'No change (here), "at" all\'s'),
    ],
)
def test_wikitext_is_detokenized_as_in_megatron(words, text):
    assert detokenize(words) == text


def test_token_ratio_equals_published_one():
    # Of the real wiki.test.tokens with GPT-2's tokenizer: T = 270,330 and T_o = 245,566.
    assert token_ratio(270_330, 245_566) == 1.1008449901248143 == 270_329 / 245_565


def test_wikitext_perplexities_follow_their_formulas(tmp_path):
    file = tmp_path / "wiki.test.tokens"
    file.write_text(" \n = Title = \n \n It was the 1990s , said Robert @-@ James . \n", encoding="utf-8")
    task = WikiText103(str(file), BYTES, positions=16, stride=4)
    text = detokenize(file.read_text())
    assert (task.tokens, task.words) == (len(text), 15)  # by single spaces
    labels = task.tokens - 1
    assert sum(window.counted for window in task.passes[0]) == labels
    found = values(task, Score(loss=1.5 * labels, labels=labels, windows=len(task.passes[0])))
    assert found["perplexity"] == pytest.approx(math.exp(1.5))
    assert found["adjusted_perplexity"] == pytest.approx(math.exp(1.5 * (task.tokens - 1) / (task.words - 1)))
    assert found["adjusted_perplexity_paper"] == pytest.approx(math.exp(1.5 * task.tokens / task.words))
    assert found["token_ratio"] == (task.tokens - 1) / (task.words - 1)
    for nats, shown in ((99.0, math.exp(99)), (800.0, math.inf)):  # v1.0 shows none above e^20
        assert values(task, Score(loss=nats * labels, labels=labels, windows=1))["perplexity"] == pytest.approx(shown)
    file.write_text("word " * 100)
    windows = WikiText103(str(file), BYTES, positions=64).passes[0]
    assert [window.counted for window in windows[:3]] == [64, 32, 32]


# --- LAMBADA ----------------------------------------------------------------------------------------------------------


def test_lambada_splits_off_last_word_and_token(tmp_path):
    file = written(tmp_path / "l.jsonl", "He saw the cat, the old  cat", "Bit by bit ")
    strict, last = Lambada(file, BYTES, positions=64).passes
    assert [(whole(window), labels_of(window)) for window in strict] == [
        ("He saw the cat, the old cat", " cat"),
        ("Bit by bit", " bit"),
    ]
    assert [(whole(window), labels_of(window)) for window in last] == [
        ("He saw the cat, the old  cat", "t"),
        ("Bit by bit ", " "),
    ]


def test_lambada_metrics_are_per_passage(tmp_path):
    task = Lambada(written(tmp_path / "l.jsonl", "one two", "three four"), BYTES, positions=64)
    strict = Score(loss=6.0, labels=9, correct=7, windows=2, all_correct=1)
    found = values(task, strict, Score(loss=1.0, labels=2, correct=2, windows=2, all_correct=2))
    assert (found["accuracy"], found["correct"], found["last_token_accuracy"]) == (0.5, 1, 1.0)
    assert found["perplexity"] == pytest.approx(math.exp(6 / 9))
    assert found["word_perplexity"] == pytest.approx(math.exp(3))


# --- Perplexity -------------------------------------------------------------------------------------------------------


def test_perplexity_predicts_every_token_of_documents(tmp_path):
    file = written(tmp_path / "d.jsonl", "abc", "", "déf")
    task = Perplexity(file, BYTES, positions=16)
    assert [window.tokens.tolist() for window in task.passes[0]] == [
        [256, *b"abc"],
        [256, *"déf".encode()],
    ]
    assert [window.counted for window in task.passes[0]] == [3, 4]
    assert (task.documents, task.bytes) == (2, 7)
    found = values(task, Score(loss=14.0, labels=4, windows=2))  # as of a tokenizer with fewer tokens than bytes
    assert found["bits_per_byte"] == pytest.approx(14 / 7 / math.log(2))


@pytest.mark.parametrize("flags", [(), ("--no-append-eod",)])
def test_perplexity_of_dataset_equals_that_of_text(tmp_path, flags):
    file = written(tmp_path / "d.jsonl", "Once upon a time", "", "there was a déjà vu")
    prepare_bytes(file, tmp_path / "corpus", append_eod=not flags)
    of_text, of_data = (Perplexity(data, BYTES, 8, 3) for data in (file, str(tmp_path / "corpus")))
    assert of_data.bytes == of_text.bytes
    assert len(of_data.passes[0]) == len(of_text.passes[0]) > 4
    for ours, theirs in zip(of_data.passes[0], of_text.passes[0], strict=True):
        assert ours.counted == theirs.counted
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def test_megatron_dataset_has_no_bits_per_byte(tmp_path):
    prepare_bytes(written(tmp_path / "d.jsonl", "Once upon a time"), tmp_path / "corpus")
    (tmp_path / "corpus.json").unlink()
    task = Perplexity(str(tmp_path / "corpus"), BYTES, 8)
    assert values(task, Score(loss=8.0, labels=16, windows=2))["bits_per_byte"] is None


def prepare_bytes(file, prefix, append_eod=True):
    import tyro

    flags = [file, "--output", str(prefix), "--tokenizer", "bytes", *([] if append_eod else ["--no-append-eod"])]
    prepare(tyro.cli(PrepareArguments, args=flags))


# --- What cannot be evaluated -----------------------------------------------------------------------------------------

FILES = [  # task, name and contents of its file, words of the sentence; {} is the file
    (WikiText103, "word.tokens", b" word \n", "{} has fewer than two words; give"),
    (Lambada, "none.jsonl", None, "there is no file {}; give"),
    (Lambada, "empty.jsonl", b"", "{} has no passage; give a file of lines"),
    (Lambada, "words.jsonl", b'{"text": "a b"}\n{"text": "One"}\n', "{}:2 has fewer than two words; lambada needs"),
    (Lambada, "long.jsonl", b'{"text": "more than seventeen bytes"}\n', "{}:1 has 25 tokens and the model has"),
    (Perplexity, "blank.jsonl", b'{"text": ""}\n', "{} has no text; give"),
    (Perplexity, "broken.jsonl", b'{"text": 5}\n', "an evaluation skips nothing"),
    (Perplexity, "corpus.bin", None, "give the prefix without the ending"),
]


@pytest.mark.parametrize(("task", "file", "contents", "words"), FILES)
def test_unusable_file_is_rejected(tmp_path, task, file, contents, words):
    if contents is not None:
        (tmp_path / file).write_bytes(contents)
    with pytest.raises(UsageError) as rejected:
        task(str(tmp_path / file), BYTES, 16, None if task is Lambada else 4)
    assert words.format(tmp_path / file) in str(rejected.value)
    assert "--malformed" not in str(rejected.value)


def test_dataset_of_another_tokenizer_is_rejected(tmp_path):
    prepare_bytes(written(tmp_path / "d.jsonl", "Once upon a time"), tmp_path / "corpus")

    class Other(ByteTokenizer):
        scheme = "other"

    with pytest.raises(UsageError, match="was prepared with another tokenizer than the run's"):
        Perplexity(str(tmp_path / "corpus"), Other(), 8)


def test_score_rejects_loss_that_is_not_finite():
    with pytest.raises(RunError, match="the model's loss on this text is nan"):
        _ = Score(loss=math.nan, labels=3).mean
