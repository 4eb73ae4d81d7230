"""`mjax prepare` and `mjax data merge` write, byte for byte, what Megatron's tools write of the same text.

No package brings tools/preprocess_data.py along, so its loop is written out here, around megatron-core's own
IndexedDatasetBuilder and NLTK's own loader.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mjax.commands import cli
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.tokenizers import load_tokenizer
from tests.data.vocabularies import NAMES, NASTY, specs
from tests.parity.vocabularies import fetched
from tests.products import diagonal

pytestmark = pytest.mark.parity
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

SENTENCES = (
    "Dr. Lee met Mr. Roe at 5 p.m. on Jan. 3rd. “Why?” he asked... No answer! The U.S. team won 3.5 to 2. (It rained.) "
)
TEXTS = [
    SENTENCES * 3,
    "",
    "   \n ",
    "no full stop at all",
    "Wow!!! Really?!? Yes. . . . so it goes.",
    "naïve café 北京。上海。 🙂🙂 \u2028 next\r\nline\ttab <|endoftext|> \x00 end.",
    "",
    *NASTY.values(),
    "A.",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def punkt(request, tmp_path_factory):
    """NLTK's tables for English, out of a package that carries them."""
    names = ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")
    folder = tmp_path_factory.mktemp("punkt")
    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
    files = fetched(request.config.cache, "llama-index-core", *(f"punkt_tab/english/{name}" for name in names))
    shutil.copytree(files[0].parent, folder / "tokenizers" / "punkt_tab" / "english")
    return folder


def megatron_prepare(file: Path, prefix: Path, tokenizer, append_eod: bool, split_sentences: bool) -> None:
    """tools/preprocess_data.py with one worker and one partition."""
    import nltk
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    splitter = nltk.load("nltk:tokenizers/punkt/english.pickle") if split_sentences else None
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocabulary))
    for line in file.open(encoding="utf-8"):
        text = json.loads(line)["text"]
        sentences = splitter.tokenize(text) if splitter else [text]  # Encoder.split
        ids, lengths = [], []  # Encoder.encode
        for sentence in sentences:
            found = tokenizer.encode(sentence)
            if len(found) > 0:
                ids.extend(found)
                lengths.append(len(found))
        if len(ids) > 0 and append_eod:
            ids.append(tokenizer.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")


def same(ours: Path | str, theirs: Path | str) -> bool:
    return all(Path(f"{ours}.{part}").read_bytes() == Path(f"{theirs}.{part}").read_bytes() for part in ("bin", "idx"))


@pytest.mark.parametrize(("name", "append_eod", "split_sentences"), diagonal(2, NAMES, [True, False], [True, False]))
def test_prepared_bytes_are_megatrons(corpus, punkt, tmp_path, monkeypatch, name, append_eod, split_sentences):
    monkeypatch.setattr("nltk.data.path", [str(punkt)])
    spec = specs(tmp_path)[name]
    megatron_prepare(corpus, tmp_path / "theirs", load_tokenizer(spec), append_eod, split_sentences)
    arguments = {"output": str(tmp_path / "ours"), "inputs": (corpus,), "tokenizer": spec, "append_eod": append_eod}
    prepare(PrepareArguments(**arguments, split_sentences=split_sentences))
    assert same(tmp_path / "ours", tmp_path / "theirs")
    assert IndexedDataset(tmp_path / "ours").documents == len(TEXTS)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_merged_bytes_are_megatrons(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    parts = [str(tmp_path / f"part{number}") for number in range(3)]
    for part in parts:
        with IndexedDatasetWriter(part, 100, dtype) as writer:
            for _ in range(20):
                writer.add_document(*(random.integers(0, 100, length) for length in random.integers(0, 9, 3)))
            writer.add_document()
    builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=dtype)  # tools/merge_datasets.py
    for part in parts:
        builder.add_index(part)
    builder.finalize(f"{tmp_path}/theirs.idx")
    assert cli.main(["data", "merge", f"{tmp_path}/ours", *parts]) == 0
    assert same(tmp_path / "ours", tmp_path / "theirs")
