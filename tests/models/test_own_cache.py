"""A layer that owns its cache: a recurrence with a state of size O(1) beside attention."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.config.model import register
from mjax.generation.generate import Generator, Sampling
from mjax.models.build import build_model
from mjax.models.parts.attention import Attention
from mjax.models.stack import stack
from mjax.parallel import mappings
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import cut_into_chunks
from tests import toy_model

PROMPTS, TOKENS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]], 6


@register
@dataclass(frozen=True)
class HybridConfig(toy_model.ToyConfig):
    kind: Literal["hybrid"] = "hybrid"
    module: ClassVar[str] = f"{__name__}:Hybrid"


class Mixer(nnx.Module):
    """Attention, and a gated linear recurrence with one number per channel."""

    def __init__(self, key, config, dtype):
        attention, into, out = jax.random.split(key, 3)
        heads = self.heads = config.heads, config.head_size
        self.attention = Attention(attention, config, dtype, kv_heads=config.kv_heads, bias=False)
        self.into = ColumnParallelLinear(into, config.hidden, (3, *heads), 1, config.init_std, dtype, bias=False)
        self.out = RowParallelLinear(out, heads, config.hidden, config.residual_std, dtype, bias=False)

    def recur(self, x, context, state):
        """The states [b, s, n, d] after each position, and what goes on to the stream."""
        y = context.tokens.by_sequence(self.into(x, context.tokens))
        new, keep, gate = (y[:, :, part] for part in range(3))
        keep = jax.nn.sigmoid(keep)
        product = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])  # noqa: E731
        kept, states = jax.lax.associative_scan(product, (keep, (1 - keep) * new), axis=1)
        states = states + kept * state[:, None]
        y = (states * jax.nn.silu(gate)).reshape(context.tokens.count, *gate.shape[2:])
        return states, self.out(y, context.tokens)

    def __call__(self, x, context):
        empty = self.empty_state(context.tokens.sequences, x.dtype)
        return self.attention(x, context) + self.recur(x, context, empty)[1]

    def empty_state(self, sequences, dtype):
        heads, size = self.heads
        return jnp.zeros((sequences, heads // mappings.size("model"), size), dtype)

    def empty_cache(self, sequences, slots, dtype):
        state = self.empty_state(sequences, dtype)
        return {"state": state, "attention": self.attention.empty_cache(sequences, slots, dtype)}

    def decode(self, x, context, cached, lengths):
        y, of_attention = self.attention.decode(x, context, cached["attention"], lengths)
        states, more = self.recur(x, context, cached["state"])
        last = lengths - 1 if context.slots is None else jnp.zeros_like(lengths)  # prompts have padding behind them
        return y + more, {"state": states[jnp.arange(len(lengths)), last], "attention": of_attention}


def hybrid_layer(key, config, dtype):
    layer = toy_model.toy_layer(key, config, dtype)
    layer.attention = Mixer(key, config, dtype)
    return layer


class Hybrid(toy_model.Toy):
    def __init__(self, key, config, dtype):
        super().__init__(key, config, dtype)
        self.blocks = stack(key, config, partial(hybrid_layer, config=config, dtype=dtype))


CONFIG = replace(
    toy_model.config,
    model=HybridConfig(
        layers=4, hidden=32, heads=4, kv_heads=2, sequence=16, vocabulary=60, vocabulary_multiple=64, attention="xla"
    ),
)


def generated(mesh):
    config = replace(CONFIG, mesh=mesh)
    generator = Generator(config, make_mesh(mesh))

    def build():
        model = jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, config.model))
        return model, cut_into_chunks(model, mesh)

    whole, cut = jax.jit(build)()
    texts = generator.generate(cut, PROMPTS, Sampling(tokens=TOKENS, temperature=0), eod=-1)
    return whole, [text.tokens for text in texts]


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(), *(pytest.param(MeshConfig(**mesh), marks=pytest.mark.ci) for mesh in ({"model": 2}, {"pipe": 2}))],
    ids=str,
)
def test_own_state_generates_what_full_forward_does(mesh):
    model, tokens = generated(mesh)
    texts = np.zeros((3, 16), np.int32)
    for text, prompt, continuation in zip(texts, PROMPTS, tokens, strict=True):
        text[: len(prompt) + TOKENS] = prompt + continuation
    forward = jax.shard_map(
        Hybrid.__call__,
        mesh=make_mesh(MeshConfig()),
        in_specs=(nnx.get_partition_spec(model), P()),
        out_specs=P(None, None, "model"),
    )
    logits = np.asarray(jax.jit(forward)(jax.device_get(model), texts))[..., :60]
    for row, prompt, continuation in zip(logits, PROMPTS, tokens, strict=True):
        assert row[len(prompt) - 1 :][:TOKENS].argmax(-1).tolist() == continuation
    assert len({tuple(continuation) for continuation in tokens}) == 3
