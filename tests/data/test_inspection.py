import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax import cli
from mjax.commands.inspect import document_lengths
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.length_figure import bin_edges

PNG, PDF = b"\x89PNG", b"%PDF"


@pytest.fixture
def dataset(tmp_path):
    """Documents of 2 to 11 tokens and an empty one."""
    file = tmp_path / "a.jsonl"
    texts = ["[bold]tag", *("x" * length for length in range(1, 11)), ""]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(PrepareArguments(output=f"{tmp_path}/d", inputs=(file,), tokenizer="bytes"))
    return f"{tmp_path}/d"


@pytest.fixture
def foreign(tmp_path):
    """A dataset as Megatron leaves it: no metadata, documents of several sequences."""
    with IndexedDatasetWriter(tmp_path / "f", 70_000) as writer:
        writer.add_document([1, 2], [3, 69_999])
        writer.add_document(np.arange(300), [5])
        writer.add_document()
    return f"{tmp_path}/f"


def inspect(capsys, *arguments):
    capsys.readouterr()
    assert cli.main(["data", "inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_figures_are_those_of_the_dataset(dataset, capsys):
    found = json.loads(inspect(capsys, dataset, "--json"))
    assert (found["documents"], found["sequences"], found["empty_documents"]) == (12, 11, 1)
    assert (found["tokens"], found["bytes"], found["dtype"]) == (9 + 55 + 11, 150, "uint16")
    lengths = [10, *range(2, 12), 0]
    assert found["lengths"]["median"] == np.median(lengths)
    assert found["lengths"]["mean"] == pytest.approx(np.mean(lengths))
    assert (found["lengths"]["shortest"], found["lengths"]["longest"]) == (0, 11)
    assert found["sample"] == "[bold]tag<|endoftext|>"
    assert found["metadata"]["tokenizer"] == "bytes"


def test_what_is_shown_is_not_taken_for_markup_and_names_every_figure(dataset, capsys):
    shown = inspect(capsys, dataset)
    for part in ("12  1 without text", "75  uint16, 150 bytes", "257  bytes", "document 0:\n[bold]tag<|endoftext|>"):
        assert part in shown


def test_any_document_can_be_shown(dataset, capsys):
    assert "document 3:\nxxx<|endoftext|>" in inspect(capsys, dataset, "--document", 3)
    assert json.loads(inspect(capsys, dataset, "--document", 11, "--json"))["sample"] == ""


def test_a_dataset_without_metadata_shows_token_ids_of_all_sequences_of_a_document(foreign, capsys):
    shown = inspect(capsys, foreign)
    assert "document 0 (token ids: the dataset has no tokenizer):\n1 2 3 69999\n" in shown
    found = json.loads(inspect(capsys, foreign, "--document", 1, "--json"))
    assert (found["metadata"], found["sample_tokens"], found["sample"]) == (None, 301, list(range(200)))
    assert "document 1, the first 200 of 301 tokens" in inspect(capsys, foreign, "--document", 1)


def test_lengths_are_those_of_documents_not_of_sequences(foreign):
    assert document_lengths(IndexedDataset(foreign)).tolist() == [4, 301, 0]


@pytest.mark.parametrize(("name", "magic"), [("a.png", PNG), ("a.pdf", PDF)])
def test_the_lengths_can_be_drawn(dataset, tmp_path, capsys, name, magic):
    shown = inspect(capsys, dataset, "--figure", tmp_path / name).replace("\n", "")
    assert f"histogram of lengths: {tmp_path}/{name}" in shown
    assert (tmp_path / name).read_bytes().startswith(magic)


@given(st.lists(st.integers(1, 10**9), min_size=1))
def test_the_bars_hold_every_document_and_begin_with_the_shortest(lengths):
    edges = bin_edges(np.sort(lengths))
    assert np.histogram(lengths, edges)[0].sum() == len(lengths)
    assert (edges[0], edges[-1]) == (min(lengths), max(lengths) + 1)
    assert np.array_equal(edges, np.round(edges))


def test_documents_that_are_all_of_one_length_can_be_drawn(tmp_path, capsys):
    with IndexedDatasetWriter(tmp_path / "one", 10) as writer:
        writer.add_document([1])
    inspect(capsys, tmp_path / "one", "--figure", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}", "--document", "12"], "--document is 12; {} has documents 0 to 11"),
        (["{}", "--document", "-1"], "--document is -1; {} has documents 0 to 11"),
        (["{}", "--figure", "a.gif"], "--figure a.gif is not a picture; use a name that ends in .png, .pdf or .svg"),
        (["{}x"], "{}x.bin does not exist; prepare it with"),
    ],
)
def test_what_cannot_be_shown_says_what_to_change(dataset, capsys, arguments, message):
    assert cli.main(["data", "inspect", *(argument.format(dataset) for argument in arguments)]) == 2
    assert message.format(dataset) in capsys.readouterr().err


def test_the_group_names_its_commands(capsys):
    assert cli.main(["data"]) == 0
    assert "usage: mjax data COMMAND …" in capsys.readouterr().out
    assert cli.main(["data", "merg"]) == 2
    assert (
        "mjax data has no command 'merg', did you mean 'merge'?; there are: inspect, merge" in capsys.readouterr().err
    )
