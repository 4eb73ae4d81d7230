"""Tokenizers and chat templates through `mjax convert`: `AutoTokenizer` gives the same at both ends."""

import json

import pytest

from mjax import cli
from mjax.data.tokenizers import tokenizer_from_folder
from tests.data.vocabularies import NASTY, TEXTS

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.chat_tokenizers import SPELLINGS, TEMPLATE, write_tokenizer  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    ("kind", "spelling"),
    [*(("llama 3", spelling) for spelling in SPELLINGS), ("qwen", "a setting"), ("sentencepiece", "a file")],
)
def test_tokenizer_comes_back_with_ids_and_chat(kind, spelling, tmp_path):
    source, run, out = tmp_path / "in", tmp_path / "run", tmp_path / "out"
    source.mkdir()
    vocabulary = write_tokenizer(kind, spelling, source)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=24, **shape)
    peer = transformers.LlamaForCausalLM(config)
    peer.config.save_pretrained(source)
    transformers.modeling_utils.safe_save_file(peer.state_dict(), source / "model.safetensors", {"format": "pt"})
    assert cli.main(["convert", "from-hf", str(source), str(run)]) == 0
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    theirs, again = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert type(again) is type(theirs)
    assert (again.special_tokens_map, again.all_special_ids) == (theirs.special_tokens_map, theirs.all_special_ids)
    for text in [*NASTY.values(), *TEXTS]:
        assert again(text).input_ids == theirs(text).input_ids, repr(text)
        assert again.decode(again(text).input_ids) == theirs.decode(theirs(text).input_ids)
    template = run / "tokenizer" / "chat_template.jinja"
    assert again.chat_template == theirs.chat_template
    assert (template.read_text() if template.exists() else None) == (None if spelling == "none" else TEMPLATE)
    if kind != "sentencepiece":  # which transformers rewrites for a library with other rules for spaces
        ours = tokenizer_from_folder(run / "tokenizer")
        for text in [*NASTY.values(), *TEXTS]:
            expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode(text) == expected, repr(text)
    generation = [transformers.GenerationConfig.from_pretrained(folder).to_diff_dict() for folder in (source, out)]
    assert generation[0] == generation[1]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == generation[0]["eos_token_id"]
