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

from mjax.commands import cli
from mjax.interop.torch_files import StandIn, load
from tests.interop.megatron_files import draw
from tests.interop.whole_weights import assert_same, weights_of
from tests.parity.megatron_written import BERT, FLAGS, GPT, convert, opened, write
from tests.small import pairs_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")

from tests.parity.both_ways import assert_scores  # noqa: E402
from tests.parity.outputs import batch_of, random_bert, with_noise  # noqa: E402

pytestmark = pytest.mark.parity

POST = replace(BERT, layernorm="post", layers=3)


def _peer(model):
    if model.kind == "bert":
        return random_bert(model, "ForPreTraining").eval()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=model.layers, n_embd=model.hidden, n_head=model.heads, n_positions=model.sequence,
        n_inner=model.feed_forward, vocab_size=model.vocabulary, attn_implementation="eager",
    )  # fmt: skip
    return with_noise(transformers.GPT2LMHeadModel(config)).eval()


@pytest.mark.parametrize(
    ("model", "version", "ranks", "stages"),
    [(GPT, 0, 4, 2), (BERT, 1.0, 4, 1), (GPT, 3.0, 1, 2), (BERT, 3.0, 2, 1), (POST, 1.0, 2, 1)],
    ids=["gpt of 2020", "bert", "two stages", "bert of 2023", "original bert"],
)
def test_any_version_and_ranks_match_transformers(model, version, ranks, stages, tmp_path):
    peer = _peer(model)
    peer.save_pretrained(tmp_path / "hf")
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "hf-run")]) == 0
    weights = weights_of(tmp_path / "hf-run")  # by way of `from-hf`, which has tests of its own
    post = argparse.Namespace(apply_residual_connection_post_layernorm=True, num_layers=3)
    beside = {"args": post} if model is POST else {}
    source = write(tmp_path / "in", weights, model, version, ranks, stages, **beside)
    assert convert(source, tmp_path / "run", *FLAGS) == 0
    assert_same(weights_of(tmp_path / "run"), weights)
    if beside or ranks == 4:  # of the others these are the same programs with the same numbers
        config, _ = opened(tmp_path / "run")
        assert_scores(tmp_path / "run", peer, pairs_of(config, 3) if model.kind == "bert" else batch_of(model))


# --- What else is in such files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "legacy"), [(torch.float16, True), (torch.bfloat16, False)])
def test_halves_are_read_exactly(dtype, legacy, tmp_path):
    rounded = {name: torch.tensor(array).to(dtype).float().numpy() for name, array in draw(BERT).items()}
    source = write(tmp_path / "in", rounded, BERT, legacy=legacy, dtype=dtype)
    assert convert(source, tmp_path / "run", *FLAGS) == 0
    assert_same(weights_of(tmp_path / "run"), rounded)


def test_training_state_is_passed_over(tmp_path, monkeypatch):
    """Classes of Megatron's own are nowhere to be found when the file is read."""
    module = ModuleType("megatron.fp16")
    module.LossScaler = type("LossScaler", (), {"__module__": module.__name__})
    for name in ("megatron", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    scaler = module.LossScaler()
    scaler.cur_scale = 2.0**32
    beside = {
        "args": argparse.Namespace(num_attention_heads=4, num_layers=2, params_dtype=torch.half, seed=1234),
        "iteration": 300_000,
        "optimizer": {"loss_scaler": scaler, "fp32_from_fp16": [[torch.ones(3)]]},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    source = write(tmp_path / "in", draw(GPT), GPT, 2.0, **beside)
    del sys.modules[module.__name__]
    content = load(source / "release" / "mp_rank_00" / "model_optim_rng.pt")
    assert isinstance(content["optimizer"]["loss_scaler"], StandIn)
    assert content["optimizer"]["loss_scaler"].cur_scale == 2.0**32
    assert convert(source, tmp_path / "run", "--vocabulary", "29") == 0
