"""`mjax convert` against `transformers` with random weights: what it opens here computes the same there, both ways."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mjax import cli
from mjax.config import MeshConfig
from mjax.data.tokenizers import tokenizer_from_folder, train_sentencepiece
from mjax.interop.bloom import BLOOM
from mjax.interop.gpt2 import GPT2
from tests.data.vocabularies import NAMES, NASTY, TEXTS, specs
from tests.interop.folders import read_folder
from tests.parity.megatron_written import scores_of
from tests.parity.peers import imported, perturbed, rate_of_megatron
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.both_ways import assert_gradients, assert_scores, exported  # noqa: E402
from tests.parity.outputs import batch_of, logits_of, loss_of  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SHAPES = {
    "three heads": {"n_layer": 3, "n_embd": 36, "n_head": 3, "n_positions": 17, "vocab_size": 101},
    "exact GELU": {"n_layer": 2, "n_embd": 40, "n_head": 5, "n_positions": 16, "vocab_size": 257, "n_inner": 52}
    | {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    "BLOOM, three heads": {"n_layer": 3, "hidden_size": 36, "n_head": 3, "seq_length": 17, "vocab_size": 101}
    | {"layer_norm_epsilon": 1e-3},
}


def _peer(shape):
    """A model of the given shape whose biases and LayerNorm weights are random too, so that none can hide."""
    torch.manual_seed(0)
    common = {**shape, "attn_implementation": "eager", "initializer_range": 0.1}
    if "seq_length" in shape:
        return perturbed(transformers.BloomForCausalLM(transformers.BloomConfig(**common)).eval(), torch)
    config = transformers.GPT2Config(**common, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config.bos_token_id = config.eos_token_id = None
    return perturbed(transformers.GPT2LMHeadModel(config).eval(), torch)


@pytest.mark.parametrize("name", SHAPES)
def test_model_comes_in_and_goes_out_the_same(name, tmp_path):
    """Its logits, loss and gradients are those of transformers, which opens the export without a missing key."""
    peer = _peer(SHAPES[name])
    config, weights = imported(peer, tmp_path)
    batch = batch_of(config.model)
    program, _ = gradient_program(config)
    loss, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected_loss = loss_of(peer, batch)
    expected_loss.backward()
    assert float(loss) == pytest.approx(expected_loss.item(), rel=1e-5)
    assert_gradients(BLOOM if "BLOOM" in name else GPT2, gradients, peer, config.model)
    again = exported(peer, tmp_path, *(("--shard-size", "20KB") if "three" in name else ()))
    with torch.no_grad():
        assert torch.equal(logits_of(again, batch), logits_of(peer, batch))
    assert_scores(tmp_path / "run", peer, batch)
    _, found = scores_of(tmp_path / "run", batch["tokens"])
    assert found[..., config.model.vocabulary :].max() < -1e30, "padding may be predicted"


def test_twenty_steps_from_import_follow_torch(tmp_path):
    peer = _peer(SHAPES["BLOOM, three heads"])
    config, weights = imported(peer, tmp_path, "--vocabulary-multiple", "6")
    config = replace(config, mesh=MeshConfig(data=2, model=3))
    ours, theirs = losses_of_both(
        config, weights, peer, loss_of, lambda step: batch_of(config.model, step % 4), rate_at=rate_of_megatron
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By name what to type after --tokenizer; "trained" is what `mjax prepare` learns where none is given."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(TEXTS, 380).save(folder / "trained")
    return specs(folder) | {"trained": f"sentencepiece:{folder}/trained/tokenizer.model"}


EXACT = [*(name for name in NAMES if name not in ("sentencepiece, unigram", "sentencepiece, as T5")), "trained"]


@pytest.mark.parametrize("kind", EXACT)
def test_exported_tokenizer_gives_same_tokens(kind, tokenizers, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    imported(_peer(SHAPES["three heads"] | {"vocab_size": 400}), tmp_path, "--tokenizer", tokenizers[kind])
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    ours, theirs = tokenizer_from_folder(run / "tokenizer"), transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == ours.eod
    assert (len(theirs), theirs.model_max_length) == (ours.vocabulary, 17)
    for text in [*TEXTS[:3], *NASTY.values()]:
        ids = ours.encode(text)
        inputs = theirs(text)
        assert sorted(inputs) == ["attention_mask", "input_ids"], "GPT-2 would take token types for tokens"
        assert inputs["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)


# --- pytorch_model.bin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
def test_pickle_is_read_on_request(legacy, tmp_path):
    state = _peer(SHAPES["three heads"]).state_dict()
    _peer(SHAPES["three heads"]).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run"), "--allow-pickle"]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for name, tensor in read_folder(tmp_path / "out").items():
        assert np.array_equal(tensor, state[name].numpy()), name
