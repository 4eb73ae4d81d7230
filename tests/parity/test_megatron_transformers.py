"""Checkpoints of Megatron from 2020 on against the models of `transformers` that they were made of.

The published 345M models are of this form: GPT-2 and BERT in release/mp_rank_00/model_optim_rng.pt, no arguments, no
version. Here they are small, and of every version, split over every number of ranks.
"""

import argparse
import random
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from mjax import cli
from mjax.interop.megatron.pickles import StandIn, load
from tests.interop.megatron_files import draw
from tests.interop.whole_weights import assert_same, weights_of
from tests.parity.megatron_written import BERT, FLAGS, GPT, convert, scores_of, write
from tests.parity.peers import perturbed

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")

pytestmark = pytest.mark.parity


def _peer(model):
    torch.manual_seed(0)
    sizes = {"vocab_size": model.vocabulary, "attn_implementation": "eager", "initializer_range": 0.2}
    if model.kind == "gpt":
        config = transformers.GPT2Config(
            n_layer=model.layers, n_embd=model.hidden, n_head=model.heads, n_positions=model.sequence,
            n_inner=model.feed_forward, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes,
        )  # fmt: skip
        return perturbed(transformers.GPT2LMHeadModel(config), torch).eval()
    name = "MegatronBert" if model.layernorm == "pre" else "Bert"
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads,
        max_position_embeddings=model.sequence, intermediate_size=model.feed_forward, layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_act="gelu", **sizes,
    )  # fmt: skip
    return perturbed(getattr(transformers, f"{name}ForPreTraining")(config), torch).eval()


def _weights(peer, folder):
    """The peer's weights by our names, by way of `from-hf`, which has tests of its own."""
    peer.save_pretrained(folder / "hf")
    assert cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "hf-run")]) == 0
    return folder / "hf-run", weights_of(folder / "hf-run")


@pytest.fixture(scope="module", params=["gpt", "bert"])
def peer(request, tmp_path_factory):
    """A peer, its shape, its weights by our names, and the run folder of `from-hf`."""
    model = GPT if request.param == "gpt" else BERT
    peer = _peer(model)
    run, weights = _weights(peer, tmp_path_factory.mktemp(request.param))
    return peer, model, weights, run


def _assert_scores(run, peer, model):
    """A run says what its peer says; returns the model of its config."""
    ids = torch.randint(model.vocabulary, (3, model.sequence), generator=torch.Generator().manual_seed(3))
    if model.kind == "gpt":
        config, words = scores_of(run, ids.numpy())
        with torch.no_grad():
            expected, text = peer(ids).logits, slice(None)
    else:
        place = torch.arange(model.sequence).expand(3, -1)
        types, text = (place > 3).long(), (place < torch.tensor([10, 7, 4])[:, None]).long()
        config, (words, order) = scores_of(run, ids.numpy(), types.numpy(), 1 - text.numpy())
        with torch.no_grad():
            found = peer(ids, attention_mask=text, token_type_ids=types)
        np.testing.assert_allclose(order, found.seq_relationship_logits.numpy(), atol=2e-5)
        expected, text = found.prediction_logits, text.numpy() == 1
    np.testing.assert_allclose(words[..., : model.vocabulary][text], expected.numpy()[text], atol=2e-5)
    return config.model


@pytest.mark.parametrize(
    ("version", "ranks", "stages"), [(0, 1, 1), (0, 4, 2), (1.0, 2, 2), (1.0, 4, 1), (3.0, 1, 2), (3.0, 2, 1)]
)
def test_any_version_and_ranks_match_transformers(peer, version, ranks, stages, tmp_path):
    peer, model, weights, run = peer
    source = write(tmp_path / "in", weights, model, version, ranks, stages)
    assert convert(source, tmp_path / "run", *FLAGS) == 0
    assert_same(weights_of(tmp_path / "run"), weights_of(run))
    if ranks != 4:  # of the others these are the same programs with the same numbers
        return
    _assert_scores(tmp_path / "run", peer, model)


def test_original_bert_matches_transformers(tmp_path):
    model = replace(BERT, layernorm="post", layers=3)
    peer = _peer(model)
    _, weights = _weights(peer, tmp_path)
    arguments = argparse.Namespace(
        apply_residual_connection_post_layernorm=True, num_attention_heads=4, model_parallel_size=2, num_layers=3
    )
    source = write(tmp_path / "in", weights, model, 1.0, ranks=2, args=arguments)
    assert convert(source, tmp_path / "run", "--vocabulary", "29") == 0
    assert _assert_scores(tmp_path / "run", peer, model).layernorm == "post"


# --- What else is in such files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_read_exactly(legacy, dtype, tmp_path):
    rounded = {name: torch.tensor(array).to(dtype).float().numpy() for name, array in draw(BERT).items()}
    source = write(tmp_path / "in", rounded, BERT, legacy=legacy)
    file = source / "release" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=True)
    torch.save(_cast(content, dtype), file, _use_new_zipfile_serialization=not legacy)
    assert convert(source, tmp_path / "run", *FLAGS) == 0
    assert_same(weights_of(tmp_path / "run"), rounded)


def _cast(tree, dtype):
    return {name: _cast(value, dtype) for name, value in tree.items()} if isinstance(tree, dict) else tree.to(dtype)


@pytest.fixture
def megatron(monkeypatch):
    """Classes of Megatron's own, which are nowhere to be found when the file is read."""
    module = ModuleType("megatron.fp16.loss_scaler")

    class DynamicLossScaler:
        def __init__(self):
            self.cur_scale = 2.0**32

    DynamicLossScaler.__module__, DynamicLossScaler.__qualname__ = module.__name__, "DynamicLossScaler"
    module.DynamicLossScaler = DynamicLossScaler
    for name in ("megatron", "megatron.fp16"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield DynamicLossScaler
    del module.DynamicLossScaler


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
def test_training_state_is_passed_over(megatron, legacy, tmp_path):
    beside = {
        "args": argparse.Namespace(num_attention_heads=4, num_layers=2, params_dtype=torch.half, seed=1234),
        "iteration": 300_000,
        "optimizer": {"loss_scaler": megatron(), "fp32_from_fp16": [[torch.ones(3)]]},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    source = write(tmp_path / "in", draw(GPT), GPT, 2.0, legacy=legacy, **beside)
    del sys.modules["megatron.fp16.loss_scaler"]
    content = load(source / "release" / "mp_rank_00" / "model_optim_rng.pt")
    assert isinstance(content["optimizer"]["loss_scaler"], StandIn)
    assert content["optimizer"]["loss_scaler"].cur_scale == 2.0**32
    assert "megatron.fp16.loss_scaler" not in sys.modules
    assert convert(source, tmp_path / "run", "--vocabulary", "29") == 0
