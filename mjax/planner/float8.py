"""Float8 in a plan: the GPUs and sizes for which `precision.compute fp8` is refused, and the seconds of scales."""

from __future__ import annotations

import math

from mjax.config import Config, MeshConfig
from mjax.errors import UsageError
from mjax.parallel.axes import DATA, MODEL, copies, sizes
from mjax.planner.rates import Rates
from mjax.step.precision import in_float8
from mjax.trace.layers import kinds_of, layer_forward

ADA = (8, 9)
"""Compute capability of the first GPUs with float8 products; Hopper's is 9.0."""
MULTIPLE = 16
"""cuBLAS multiplies float8 matrices whose sizes are multiples of this."""


def check_float8(config: Config, gpu: str, capability: tuple[int, ...]) -> None:
    """Refuse float8 on a GPU without it, and sizes that its products do not take.

    Args:
      config: validated.
      gpu: its name, for the message.
      capability: its compute capability.

    Raises:
      UsageError: one sentence, with what to change.
    """
    if not in_float8(config.precision):
        return
    if capability < ADA:
        raise UsageError(
            f"--precision.compute fp8 needs a GPU with compute capability 8.9 or more, such as an H100, and {gpu} has "
            f"{'.'.join(map(str, capability))}; use --precision.compute bf16"
        )
    model, train = config.model, config.train
    tokens = train.micro_batch * model.sequences * model.sequence
    if tokens % MULTIPLE:
        raise UsageError(
            f"--precision.compute fp8 multiplies micro-batches of a multiple of {MULTIPLE} tokens, and --train.micro-"
            f"batch {train.micro_batch} has {tokens}; use a --train.micro-batch that is a multiple of {MULTIPLE}"
        )
    for _, of in kinds_of(config):
        for product in layer_forward(of).program.products:
            if product.of_weight and (product.k % MULTIPLE or product.n % MULTIPLE):
                raise UsageError(
                    f"--precision.compute fp8 multiplies matrices whose sizes are multiples of {MULTIPLE}, and a rank "
                    f"of --mesh.model {config.mesh.model} has a weight of {product.k} × {product.n}; change the mesh "
                    "or the model, or use --precision.compute bf16"
                )


def agreement_seconds(agreed: tuple[tuple[str, ...], ...], mesh: MeshConfig, rates: Rates) -> tuple[float, float]:
    """Seconds of the all-reduces of scales whose axes are `agreed`: of those over `model` only, and of the others.

    Those of weights are over `model` only; where the others are too, XLA combines them with one of these.
    """
    over_model = over_data = 0.0
    for axes in agreed if copies(mesh) > 1 else (each for each in agreed if DATA in each):
        seconds = rates.agree(math.prod(sizes(mesh)[axis] for axis in axes), 1 if MODEL in axes else mesh.model)
        if DATA in axes and copies(mesh) > 1:
            over_data += seconds
        else:
            over_model += seconds
    return over_model, over_data
