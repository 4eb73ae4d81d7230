"""A folder of each family of Llamas with its tokenizer and chat template: through a run and back the tensors, the
tokenizer as `AutoTokenizer` opens it, and what the model writes."""

import json

import pytest

from mjax.checkpoint.base import restore_weights
from mjax.commands import cli
from mjax.config import MeshConfig, read_config
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.generation.generate import Generator, Sampling
from mjax.generation.inference import inference_config
from mjax.parallel.mesh import make_mesh
from tests.data.vocabularies import NASTY, TEXTS
from tests.interop.folders import read_folder
from tests.interop.whole_weights import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.chat_tokenizers import TEMPLATE, write_tokenizer  # noqa: E402
from tests.parity.outputs import with_noise  # noqa: E402
from tests.parity.test_llama_transformers import GEMMA, LLAMA3, SMALL  # noqa: E402

pytestmark = pytest.mark.parity

LONG = {"max_position_embeddings": 96, "initializer_range": 0.3}
CASES = [  # the class, the kind of tokenizer, how its chat template is spelled, and settings of the model
    ("Llama", "llama 3", "files", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    ("Mistral", "sentencepiece", "a file", {"sliding_window": 20, "head_dim": 10}),
    ("Qwen3", "qwen", "a setting", {"head_dim": 16, "num_key_value_heads": 1}),
    ("Olmoe", "llama 3", "a list", {"num_experts": 4, "num_experts_per_tok": 3}),
    ("Olmo2", "llama 3", "none", {}),
    ("Gemma3", "llama 3", "none", {**GEMMA, "num_hidden_layers": 5, "initializer_range": 0.05}),
]


@pytest.mark.parametrize(("name", "kind", "spelling", "settings"), CASES)
def test_folder_comes_back_and_generates_the_same(name, kind, spelling, settings, tmp_path):
    source, run, out = tmp_path / "in", tmp_path / "run", tmp_path / "out"
    source.mkdir()
    vocabulary = write_tokenizer(kind, spelling, source)
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    peer = with_noise(cls(cls.config_class(**{**SMALL, **LONG, "vocab_size": vocabulary, **settings})).eval())
    ids = transformers.GenerationConfig.from_pretrained(source)  # save_pretrained would write its own
    peer.generation_config = ids
    peer.save_pretrained(source, max_shard_size="20KB")
    assert cli.main(["convert", "from-hf", str(source), str(run)]) == 0
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    assert_same(read_folder(out), read_folder(source))

    theirs, again = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert type(again) is type(theirs)
    assert (again.special_tokens_map, again.all_special_ids) == (theirs.special_tokens_map, theirs.all_special_ids)
    ours = tokenizer_from_folder(run / "tokenizer")
    for text in [*NASTY.values(), *TEXTS]:
        assert again(text).input_ids == theirs(text).input_ids, repr(text)
        assert again.decode(again(text).input_ids) == theirs.decode(theirs(text).input_ids)
        if kind != "sentencepiece":  # which transformers rewrites for a library with other rules for spaces
            expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode(text) == expected, repr(text)
    template = run / "tokenizer" / "chat_template.jinja"
    assert again.chat_template == theirs.chat_template
    assert (template.read_text() if template.exists() else None) == (None if spelling == "none" else TEMPLATE)

    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is type(peer)
    assert model.generation_config.to_diff_dict() == ids.to_diff_dict()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ids.eos_token_id
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # which ends no text
    inputs = again("It was the best of times", return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0].tolist()
    prompt = inputs["input_ids"][0].tolist()
    config = inference_config(read_config(run / "config.json"), MeshConfig(), compute="fp32")
    generator = Generator(config, make_mesh(config.mesh))
    _, weights = restore_weights(run, generator.abstract_model, None, print)
    (found,) = generator.generate(weights, [prompt], Sampling(tokens=64, temperature=0.0), -1)
    assert written == [*prompt, *found.tokens]
    assert len(set(found.tokens)) > 8, "one token over and over says little"
