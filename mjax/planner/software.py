"""Properties of a training program that no config contains, for the model of time: what it sends and what it hides.

mjax's own program is traced: its products, the bytes of its kernels and its collectives are read from the trace of a
layer. The programs of the papers cannot be traced; what their kernels read and write was read from their code
(`Written`). Nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from mjax.config import Config


@dataclass(frozen=True)
class Written:
    """Bytes of the kernels of a program that cannot be traced: of 16-bit activations, read and written by one layer's
    forward pass, per element of the given tensor.

    Attributes:
      stream: per element of [tokens, h]: LayerNorms, dropout, residual sums.
      mlp: per element of [tokens, f / p]: GELU.
      scores: per element of the scores [b, n / p, s, s]: scale, mask, softmax, dropout; not reads and writes of the two
        products.
      logits: per element of the vocabulary scores, forward and backward.
      kernels: launches of a layer's forward pass, except its products.
      backward: bytes of a backward pass divided by those of the forward.
    """

    stream: float
    mlp: float
    scores: float
    logits: float
    kernels: int
    backward: float


@dataclass(frozen=True)
class Overlap:
    """The collectives that run beside products: the one place that says so.

    Attributes:
      backward: share of a layer's backward collectives over `model` that stands beside the products of its weights'
        gradients, at most as long as these take.
      repeated: with sequence parallelism the same of the gathers of kept tokens that recomputation repeats, beside the
        products of gradients: both of a layer with selective recomputation, the first with full.
      gradients: sums over `data` run beside the backward pass of the only micro-batch, without ZeRO and without a loop
        over its layers.
      weights: share of FSDP's gathers of weights and sums of gradients that runs beside the layers' own kernels.
      copies: the copies into and out of the stacks of a loop over layers run beside the products.
    """

    backward: float
    repeated: float = 0.0
    gradients: bool = False
    weights: float = 0.0
    copies: bool = False


@dataclass(frozen=True)
class Software:
    """A training program.

    Attributes:
      name: of the program.
      written: bytes of its kernels; None if its layers are traced.
      flash: it has a flash attention kernel.
      overlap: what it hides; None if that depends on the config (`overlap_of`).
      repeated_sums: all-reduces of a layer that full recomputation repeats. The last one of a layer is dead code, which
        XLA removes.
      gradient_bytes: per element when gradients are summed over `data`.
      accumulate_bytes: read and written per weight when the gradients of a micro-batch are accumulated.
      optimizer_bytes: read and written per weight by norm, clipping, Adam and the cast to the compute dtype.
      splits_messages: each rank of `model` sends its part of an activation to the next stage, which gathers it (arXiv
        2104.04473, section 4.1), with sequence parallelism or without.
      sends_every_tick: stages synchronise after every tick of the schedule and send both ways, even without a receiver.
    """

    name: str
    written: Written | None
    flash: bool
    overlap: Overlap | None
    repeated_sums: int
    gradient_bytes: int
    accumulate_bytes: int
    optimizer_bytes: int
    splits_messages: bool
    sends_every_tick: bool

    def overlap_of(self, config: Config) -> Overlap:
        """What the program hides with this config."""
        return self.overlap or mjax_overlap(config, jax.__version_info__)


def mjax_overlap(config: Config, version: tuple[int, ...]) -> Overlap:
    """What mjax's step hides when compiled by a version of jax, read from programs compiled for H100s.

    With sequence parallelism a barrier ties each reduce-scatter of the backward pass to the product beside it, in every
    version; the all-gather before it is needed at once, and one that is repeated needs only what was kept. Without
    sequence parallelism XLA decides: jax 0.10 puts the all-reduce beside the product, 0.11 behind it; and 0.11 copies
    into the stacks of a loop beside the products. FSDP gathers weights and sums gradients beside the layers. Without
    ZeRO and a loop over layers the sums of the only micro-batch run beside the gradients of the weights. XLA has one
    collective in flight, so none of these runs beside those over `model` (docs/benchmarks.md).
    """
    newer = version >= (0, 11)
    if config.mesh.splits_tokens:
        return Overlap(backward=0.5, repeated=1.0, copies=newer)
    alone = config.mesh.model == 1
    return Overlap(backward=0.0 if newer else 1.0, gradients=alone, weights=0.85 * alone, copies=newer)


# The 26 bytes of Adam, 2 of the norm and 6 of the cast were read from programs compiled for H100s (docs/benchmarks.md).
MJAX = Software(
    name="mjax", written=None, flash=True, overlap=None,
    repeated_sums=1, gradient_bytes=4, accumulate_bytes=12, optimizer_bytes=34,
    splits_messages=False, sends_every_tick=True,
)  # fmt: skip
