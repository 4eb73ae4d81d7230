"""The token that begins texts, as `transformers` reads it from each kind of tokenizer and each setting."""

import json

import pytest
import tokenizers
from tokenizers import processors

from mjax.config import GPTConfig
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.interop.tokenizer_files import open_tokenizer, to_fast_tokenizer, write_tokenizer
from tests.data.vocabularies import gpt2_files

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity import chat_tokenizers  # noqa: E402

pytestmark = pytest.mark.parity

PLAIN = ["", "It was the best of times", "1968", "The quick brown fox jumps over the lazy dog."]
KINDS = ["llama 3", "sentencepiece", "qwen"]


def set_post_processor(folder, change):
    file = folder / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(file))
    values = json.loads(library.to_str())
    values["post_processor"] = None
    kept, library = library.post_processor, tokenizers.Tokenizer.from_str(json.dumps(values))
    if change == "sequence":  # as Llama 3's
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), kept])
    library.save(str(file))


@pytest.mark.parametrize("settings", [{"add_bos_token": True}, {"add_bos_token": False}, {}], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "llama 3, sequence", "llama 3, none", "gpt2"])
def test_texts_begin_as_in_transformers(kind, settings, tmp_path):
    """Reads a model folder, a run, and the tokenizer.json of an export."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    file, model_type = source / "tokenizer_config.json", "gpt2" if kind == "gpt2" else "llama"
    if kind == "gpt2":
        gpt2_files(source)
        file.write_text('{"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>"}')
    else:
        chat_tokenizers.write_tokenizer(kind.partition(",")[0], "none", source)
    if "," in kind:
        set_post_processor(source, kind.partition(", ")[2])
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    values = json.loads(file.read_text())
    values.pop("add_bos_token", None)
    file.write_text(json.dumps(values | settings))

    theirs, found = transformers.AutoTokenizer.from_pretrained(source), open_tokenizer(source, None)
    found.save(tmp_path / "saved")
    write_tokenizer(found, to_fast_tokenizer(found), out, GPTConfig())
    exported = transformers.AutoTokenizer.from_pretrained(out)
    for ours in (found, tokenizer_from_folder(tmp_path / "saved"), open_tokenizer(out, None)):
        assert [ours.encode_prompt(text) for text in PLAIN] == [theirs(text).input_ids for text in PLAIN]
    assert [exported(text).input_ids for text in PLAIN] == [theirs(text).input_ids for text in PLAIN]
