"""The axis `context`: published bugs are found, what is sent, where positions are, and whole runs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mjax
from mjax.config import MeshConfig
from mjax.config.axes import axes_sharing_weights
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.models import causal
from mjax.models.parts import attention_kernels
from mjax.parallel import mappings, named_scopes
from mjax.parallel.mesh import make_mesh
from mjax.parallel.token_layout import TokenLayout
from mjax.planner.ledger import ledger
from mjax.step import step
from tests.against_reference import largest_error
from tests.callbacks import StopAt
from tests.small import BLOOM, small_config
from tests.training.test_trainer import losses as losses_of

PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


# --- What others published as bugs ------------------------------------------------------------------------------------


def _planted(way="ulysses", **changes):
    return largest_error(
        small_config(2, 1, 2, "none", "fp64", mesh={"context": 2, "context_attention": way}, **changes)
    )


def test_loss_divided_on_each_rank_is_found(monkeypatch):
    """torchtitan issues 3280 and 3329: each rank's mean, instead of one over all of them."""

    def of_rank(model, batch):
        return {name: count * mappings.size(axes_sharing_weights()) for name, count in model.counts(batch).items()}

    monkeypatch.setattr(step, "global_counts", of_rank)
    assert _planted(samples=PACKED)["loss"] > 1e-3


def test_labels_shifted_after_the_cut_are_found(monkeypatch):
    """The last label of a rank is then not the first token of the next one."""
    loss = causal.CausalModel.loss

    def shifted(self, x, batch, context):
        return loss(self, x, batch | {"labels": jnp.roll(batch["tokens"], -1, axis=1)}, context)

    monkeypatch.setattr(causal.CausalModel, "loss", shifted)
    assert _planted()["loss"] > 1e-3


@pytest.mark.ci
@pytest.mark.parametrize(("way", "positions"), [("ulysses", "alibi"), ("allgather", "learned")])
def test_positions_of_a_rank_are_found(way, positions, monkeypatch):
    monkeypatch.setattr(TokenLayout, "position_ids", lambda self: jnp.arange(self.positions))
    changes = BLOOM | {"heads": 8, "hidden": 64} if positions == "alibi" else {}
    if positions == "alibi" and way == "ulysses":  # it sees whole sequences: only dropout depends on the rank
        changes |= {"dropout": 0.1}
    assert _planted(way, **changes)["blocks.attention.qkv.kernel"] > 1e-5


def test_gradients_not_summed_over_context_are_found(monkeypatch):
    """Megatron-LM issue 1464. Left out, the sum is refused by its type; here one rank's part passes for it."""
    whole = mappings.psum

    def of_rank_0(x, axes):
        return whole(mappings.mask_to_first_context_rank(x) if x.ndim and "context" in axes else x, axes)

    monkeypatch.setattr(mappings, "psum", of_rank_0)
    errors = _planted()
    assert errors["loss"] < 1e-12
    assert errors["blocks.mlp.up.kernel"] > 1e-4


@pytest.mark.ci
def test_heads_in_another_order_are_found(monkeypatch):
    right = attention_kernels.repeat_heads
    monkeypatch.setattr(attention_kernels, "repeat_heads", lambda x, heads: jnp.flip(right(x, heads), 2))
    assert _planted()["loss"] > 1e-4


# --- What is sent -----------------------------------------------------------------------------------------------------


def test_ledger_has_what_the_docstring_of_across_says():
    context, b, s, h, layers, width = 4, 2, 16, 32, 2, 2

    def sent(way, **changes):
        mesh = {"context": context, "context_attention": way}
        config = small_config(1, 1, b, compute="bf16", global_batch=b, mesh=mesh, layers=layers, **changes)
        return ledger(config).filter_axes("context").group_by("part")[named_scopes.LAYER].group_by("operation")

    share = (context - 1) / context
    (of_heads,) = sent("ulysses").values()
    assert of_heads.sent == 2 * layers * 4 * share * b * s * h / context * width  # forward and backward
    assert of_heads.count == 2 * layers * 4
    found = sent("allgather")
    assert {name: part.count for name, part in found.items()} == {
        "all-gather": 2 * layers,
        "reduce-scatter": 2 * layers,
    }
    assert sum(part.sent for part in found.values()) == 2 * layers * 2 * share * b * s * h * width


# --- Where positions are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [3, 4])
def test_positions_are_balanced_over_ranks(context):
    mesh = make_mesh(MeshConfig(context=context))
    tokens = TokenLayout(1, 4, context_attention="allgather")

    def on_rank(row):
        own = tokens.exchange_positions(row)
        return own, tokens.position_ids()[None], tokens.gather_positions(own)[None]

    row = np.arange(4 * context, dtype=np.int32)[None]
    specs = P(None, "context"), P(None, "context"), P("context")
    own, places, whole = jax.shard_map(on_rank, mesh=mesh, in_specs=specs[0], out_specs=specs)(row)
    assert sorted(own[0].tolist()) == row[0].tolist()
    np.testing.assert_array_equal(own, places)
    assert (np.asarray(whole) == row).all()
    seen = (np.asarray(places) + 1).reshape(context, 4).sum(1)
    assert (seen == seen[0]).all()


# --- Runs -------------------------------------------------------------------------------------------------------------


def _run_config(steps=60, **mesh):
    config = small_config(2, 1, 4, mesh=mesh, samples=PACKED)
    optimizer = replace(config.optimizer, learning_rate=2e-3)  # with 1e-2 rounding grows tenfold in 20 steps
    return replace(config, optimizer=optimizer, train=replace(config.train, steps=steps, eval_interval=0))


def _trained(config, folder, **options):
    mjax.Trainer(config, folder, show=False, **options).train()
    return losses_of(folder)


@pytest.mark.ci
def test_run_continues_on_other_contexts_as_on_one_device(tmp_path, fewer_devices, quick_runs):
    """Sixty steps with dropout and documents: on one device; on context 4, then 1, then 2 with balanced chunks."""
    whole = _trained(replace(_run_config(), mesh=MeshConfig()), tmp_path / "whole")
    until_20, until_40 = ({"callbacks": [StopAt(last)]} for last in (20, 40))
    moved = tmp_path / "moved"
    assert len(_trained(_run_config(context=4, zero=1), moved, **until_20)) < 25
    _trained(_run_config(), moved, **until_40)
    found = _trained(_run_config(context=2, context_attention="allgather", zero=3), moved)
    assert len(found) == len(whole) == 60
    assert found == pytest.approx(whole, rel=1e-5)
    assert max(whole) > 1.001 * min(whole)  # it learns


# --- What is refused --------------------------------------------------------------------------------------------------


def test_impossible_split_is_refused():
    """One that heads cannot make; `tests/test_bad_inputs.py` has others."""
    config = small_config(model=4, mesh={"context": 4, "context_attention": "ulysses"})
    with pytest.raises(
        UsageError, match=r"does not divide the 2 heads of .*; use --mesh.context 2, or --mesh.context-attention al"
    ):
        validate(config)


def test_heads_are_split_where_possible():
    config = small_config()
    for context, model, way in ((1, 1, None), (2, 4, "ulysses"), (4, 4, "allgather"), (3, 1, "allgather")):
        assert replace(config, mesh=MeshConfig(context=context, model=model)).context_attention == way
