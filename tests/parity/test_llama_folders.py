"""A folder of each family of Llamas with its tokenizer: through a run and back, and what it writes from then on."""

import pytest

from mjax import cli
from mjax.config import MeshConfig, read_config
from mjax.generation import Generator
from mjax.inference import inference_config
from mjax.parallel.mesh import make_mesh
from mjax.sampling import Sampling
from mjax.state.checkpoint import restore_weights
from tests.interop.folders import read_folder
from tests.interop.whole_weights import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.chat_tokenizers import write_tokenizer  # noqa: E402
from tests.parity.outputs import with_noise  # noqa: E402
from tests.parity.test_convert_llama_transformers import SCALED, SMALL  # noqa: E402

pytestmark = pytest.mark.parity

LONG = {"max_position_embeddings": 96, "initializer_range": 0.3}
FAMILIES = {
    "Llama": ("llama 3", {"rope_parameters": SCALED}),
    "Mistral": ("sentencepiece", {"sliding_window": 20, "head_dim": 10}),
    "Qwen3": ("qwen", {"head_dim": 16, "num_key_value_heads": 1}),
    "Olmoe": ("llama 3", {"num_experts": 4, "num_experts_per_tok": 3}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_folder_comes_back_and_generates_the_same(name, tmp_path):
    kind, settings = FAMILIES[name]
    source, run, out = tmp_path / "in", tmp_path / "run", tmp_path / "out"
    source.mkdir()
    vocabulary = write_tokenizer(kind, "a setting", source)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **LONG, "vocab_size": vocabulary, **settings})
    peer = with_noise(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    ids = transformers.GenerationConfig.from_pretrained(source)  # save_pretrained would write its own
    peer.generation_config = ids
    peer.save_pretrained(source, max_shard_size="20KB")
    assert cli.main(["convert", "from-hf", str(source), str(run)]) == 0
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    assert_same(read_folder(out), read_folder(source))

    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert type(model) is type(peer)
    assert model.generation_config.eos_token_id == ids.eos_token_id
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # which ends no text
    inputs = tokenizer("It was the best of times", return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0].tolist()
    prompt = inputs["input_ids"][0].tolist()
    config = inference_config(read_config(run / "config.json"), MeshConfig(), compute="fp32")
    generator = Generator(config, make_mesh(config.mesh))
    _, weights = restore_weights(run, generator.abstract_model, None, print)
    (found,) = generator.generate(weights, [prompt], Sampling(tokens=64, temperature=0.0), -1)
    assert written == [*prompt, *found.tokens]
    assert len(set(found.tokens)) > 8, "one token over and over says little"
