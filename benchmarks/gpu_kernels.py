"""Matrix products, attention and memory-bound kernels of a model's layers, each alone: the roof of a step.

    python benchmarks/gpu_kernels.py --config gpt_1b --micro-batch 8

Timed as in calibrate.py, on random arrays. The sum over a step is a time that no change outside these kernels beats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.calibrate import drawn, seconds_of
from benchmarks.command import check_counts, check_output, in_one_sentence
from mjax.config import Config, MeshConfig, load_config
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from mjax.planner.layer import model_flops
from mjax.step.precision import COMPUTE_TYPES
from mjax.utils.figures import format_table


@dataclass(frozen=True)
class Arguments:
    """Time the kernels of a model on one device."""

    config: str = "gpt_1b"
    """GPT config with learned positions: a name or the path to a .py file."""
    micro_batch: int = 8
    """Sequences."""
    rounds: int = 3
    """Measurements per kernel. The fastest counts."""
    output: Path | None = None
    """Also write the table to this file: .json."""
    tiny: bool = False
    """A toy model, to try the command. The measurements are meaningless."""


class Timed(NamedTuple):
    """A kernel.

    Attributes:
      times: in a step.
      flops, bytes: of one; 0 if it is not measured by that.
      function: of the arrays.
      shapes: of the arrays.
    """

    name: str
    times: float
    flops: float
    bytes: float
    function: Callable
    shapes: tuple


def chained(function: Callable) -> Callable:
    """x → x for the arrays of `function`: the next call has to wait for the result of this one."""
    import jax
    import jax.numpy as jnp

    def call(x):
        leaf = jax.tree.leaves(jax.lax.optimization_barrier(function(*x)))[0]
        token = 1e-30 * leaf[(0,) * leaf.ndim].astype(jnp.float32)
        return x[0].at[(0,) * x[0].ndim].add(token.astype(x[0].dtype)), *x[1:]

    return call


def all_kernels(config: Config, kernel: str) -> Iterator[Timed]:
    """Time the kernels of a training step; attention by `kernel`. Attention's forward pass is part of `forward and
    backward`."""
    yield from _products(config)
    yield from _attention(config, kernel)
    yield from _memory(config)


def _sizes(config: Config):
    import jax

    dtype = COMPUTE_TYPES[config.precision.compute]
    model, tokens = config.model, config.train.micro_batch * config.model.sequence

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    return model, tokens, array


def _products(config: Config) -> Iterator[Timed]:
    """y = x A with its gradients dx = dy Aᵀ and dA = xᵀ dy, for a layer; then for the logits."""
    model, t, array = _sizes(config)
    h, f, v = model.hidden, model.mlp_width, model.padded_vocabulary
    for name, k, n, times in (
        ("qkv", h, 3 * h, model.layers),
        ("out", h, h, model.layers),
        ("up", h, f, model.layers),
        ("down", f, h, model.layers),
        ("logits", h, v, 1),
    ):
        x, a, g = array(t, k), array(k, n), array(t, n)
        flops = 2.0 * t * k * n
        yield Timed(f"{name}: y = x A", times, flops, 0, lambda x, a: x @ a, (x, a))
        yield Timed(f"{name}: dx = dy Aᵀ", times, flops, 0, lambda g, a: g @ a.T, (g, a))
        yield Timed(f"{name}: dA = xᵀ dy", times, flops, 0, lambda x, g: x.T @ g, (x, g))


def _attention(config: Config, kernel: str) -> Iterator[Timed]:
    import jax

    from mjax.models.parts.attention_kernels import attend
    from mjax.models.parts.mask import AttentionMask

    model, t, array = _sizes(config)
    s, n, d = model.sequence, model.heads, model.head_size
    qkv = (array(t // s, s, n, d),) * 3
    flops = 4.0 * (t // s) * n * s * s * d / 2

    def forward(q, k, v):
        return attend(q, k, v, AttentionMask(), kernel)

    def both(q, k, v):
        out, back = jax.vjp(forward, q, k, v)
        return back(out)

    yield Timed(f"attention {kernel}, forward", 0, flops, 0, forward, qkv)
    yield Timed(f"attention {kernel}, forward and backward", model.layers, 3.5 * flops, 0, both, qkv)


def _memory(config: Config) -> Iterator[Timed]:
    """LayerNorm and the activation of a layer with their gradients, and Adam."""
    import jax
    import jax.numpy as jnp

    from mjax.models.parts.mlp import activate
    from mjax.models.parts.norms import LayerNorm

    model, t, array = _sizes(config)
    h, f, layers, dtype = model.hidden, model.mlp_width, model.layers, array(1).dtype
    narrow, wide, weight, size = array(t, h), array(t, f), array(h), dtype.itemsize

    def norm(x, scale, bias):
        layer = LayerNorm(h, model.layernorm_epsilon, dtype)
        layer.scale[...], layer.bias[...] = scale, bias
        return layer(x)

    def activation(x):
        return activate(x, model.activation)

    def adam(p, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * jnp.square(g.astype(jnp.float32))
        return p - 1e-4 * (m / (jnp.sqrt(jnp.abs(v)) + 1e-8) + 0.01 * p), m, v

    yield Timed("LayerNorm", 2 * layers, 0, 2.0 * size * t * h, norm, (narrow, weight, weight))
    yield Timed(
        "LayerNorm, backward", 2 * layers, 0, 3.0 * size * t * h,
        lambda x, scale, bias, g: jax.vjp(norm, x, scale, bias)[1](g), (narrow, weight, weight, narrow),
    )  # fmt: skip
    yield Timed("activation", layers, 0, 2.0 * size * t * f, activation, (wide,))
    yield Timed(
        "activation, backward", layers, 0, 3.0 * size * t * f,
        lambda x, g: jax.vjp(activation, x)[1](g), (wide, wide),
    )  # fmt: skip
    some = min(count_parameters(model), 2**28)
    state = (array(some, dtype=jnp.float32),) * 3
    yield Timed("Adam", count_parameters(model) / some, 0, (24.0 + size) * some, adam, (*state, array(some)))


def measured(config: Config, kernel: str, rounds: int) -> tuple[list[dict], float]:
    """The rows of the table, and the seconds of a step that has these kernels only; one that fails is a row too."""
    rows, total = [], 0.0
    for timed in all_kernels(config, kernel):
        try:
            seconds = seconds_of(chained(timed.function), drawn(timed.shapes), rounds)
        except Exception as error:
            rows.append({"kernel": timed.name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"})
            continue
        total += timed.times * seconds
        row = {"kernel": timed.name, "µs": f"{1e6 * seconds:,.1f}", "ms a step": f"{1e3 * timed.times * seconds:,.2f}"}
        row["TFLOP/s"] = f"{timed.flops / seconds / 1e12:,.1f}" if timed.flops else None
        row["GB/s"] = f"{timed.bytes / seconds / 1e9:,.0f}" if timed.bytes else None
        rows.append(row)
    return rows, total


def one_micro_batch(arguments: Arguments) -> Config:
    """The config on one device, with one micro-batch a step and no dropout."""
    config, batch = load_config(arguments.config), arguments.micro_batch
    model, compute = replace(config.model, hidden_dropout=0.0, attention_dropout=0.0), config.precision.compute
    if arguments.tiny:
        model = replace(model, layers=2, hidden=32, heads=4, sequence=16, vocabulary=250, vocabulary_multiple=128)
        batch, compute = 2, "fp32"
    train = replace(config.train, global_batch=batch, micro_batch=batch, batch_rampup=None)
    precision = replace(config.precision, compute=compute)
    data = replace(config.data, mock=True)
    return replace(config, model=model, mesh=MeshConfig(), data=data, train=train, precision=precision)


@in_one_sentence
def main() -> int:
    """Measure, print, write; 1 if a kernel failed."""
    arguments = tyro.cli(Arguments, prog="gpu_kernels.py")
    check_counts(arguments, "micro_batch", "rounds")
    if arguments.output is not None:
        check_output("--output", arguments.output)
    config = one_micro_batch(arguments)
    if config.model.kind != "gpt":
        raise UsageError(f"--config {arguments.config} is a {config.model.kind}; use a GPT config")
    validate(config, arguments.config)
    import jax

    from mjax.step.layout import with_kernel

    kernel = with_kernel(config).model.attention
    rows, total = measured(config, kernel, arguments.rounds)
    columns = ("kernel", "µs", "ms a step", "TFLOP/s", "GB/s")
    print(
        *format_table(columns, [tuple(str(row.get(c) or row.get("failed") or "–") for c in columns) for row in rows]),
        sep="\n",
    )
    roof = (
        f"In a row they take {1e3 * total:,.1f} ms a step, so with these kernels a step has at most "
        f"{model_flops(config) / total / 1e12:,.3g} model TFLOP/s."
    )
    print(roof)
    title = f"Kernels of {arguments.config}, micro-batch {config.train.micro_batch}, on {jax.devices()[0].device_kind}"
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"title": title, "rows": rows, "roof": roof}, indent=1))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
