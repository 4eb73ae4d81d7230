"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys are rotated by an angle that grows with the position, so
that their scores depend on the distance between them.

The dims i and i + d/2 of a head are a pair, as in Hugging Face and megatron-core (Meta's files pair neighbors). At
position j the pair i is rotated by j · f_i:

    f_i = θ^(−2i/d)           i < d/2          [a, b] → [a cos − b sin, b cos + a sin]

For sequences longer than in pretraining the frequencies are lowered, by a factor c:

    linear   f / c
    llama3   wavelengths 2π/f below original / 4 stay, those above the original length have f / c, and between the two
             limits it is a mixture, linear in original · f / 2π (Llama 3.1)
    yarn     pairs with more than 32 rotations over the original length stay, those with less than one have f / c, and
             between is a ramp over i; both cos and sin are multiplied by 0.1 ln c + 1 (arXiv 2309.00071)
"""

import math
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mjax.models.parts.positions import Positions
from mjax.models.protocol import ForwardContext
from mjax.parallel.autodiff import linear_call
from mjax.parallel.reductions import accumulation_dtype

LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0  # of llama3: rotations over the original length, between two limits
BETA_SLOW = 1.0  # of yarn: rotations over the original length


@dataclass(frozen=True)
class Rotary(Positions):
    """Rotary positions of queries and keys.

    Attributes:
      dims: of a head that are rotated, its first ones; even.
      theta: base of the frequencies.
      scaling: `none`, `linear`, `llama3` or `yarn`.
      factor: by which frequencies are lowered.
      original: positions of pretraining; for `llama3` and `yarn`.
      beta_fast: for `yarn`, the rotations over these positions above which a pair keeps its frequency.
    """

    dims: int
    theta: float
    scaling: str = "none"
    factor: float = 1.0
    original: int | None = None
    beta_fast: float = 32.0

    def apply_to_qk(
        self, q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], context: ForwardContext
    ) -> tuple[Float[Array, "b s n d"], Float[Array, "b s k d"]]:
        """Rotate queries and keys by the positions of their tokens within their documents."""
        positions = context.position_ids()
        return _rotate(q, positions, self), _rotate(k, positions, self)

    def frequencies(self) -> Float[np.ndarray, " pairs"]:
        """Radians a position, of each pair of dims."""
        plain = self.theta ** (-np.arange(0, self.dims, 2) / self.dims)
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "llama3":
            rotations = self.original * plain / (2 * math.pi)
            unscaled = np.clip((rotations - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR), 0, 1)
        elif self.scaling == "yarn":
            fast, slow = (
                self.dims * math.log(self.original / (2 * math.pi * rotations)) / (2 * math.log(self.theta))
                for rotations in (self.beta_fast, BETA_SLOW)
            )  # pairs
            low, high = max(math.floor(fast), 0), min(math.ceil(slow), self.dims - 1)
            unscaled = 1 - np.clip((np.arange(self.dims // 2) - low) / max(high - low, 0.001), 0, 1)
        else:
            return plain
        return plain * unscaled + plain / self.factor * (1 - unscaled)

    def magnitude(self) -> float:
        """The factor of cos and sin."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0


# A custom backward pass, because a rotation is linear: its gradient needs the positions only, where autodiff would save
# cos and sin of every layer.
def _rotate(x: Float[Array, "b s n d"], positions: Int[Array, "#b s"], rotary: Rotary) -> Float[Array, "b s n d"]:
    forward, transpose = (partial(_rotate_by, rotary=rotary, direction=direction) for direction in (1.0, -1.0))
    return linear_call(forward, transpose, x, positions)


def _rotate_by(x: Array, positions: Array, rotary: Rotary, direction: float) -> Array:
    wide = accumulation_dtype(x.dtype)
    angle = positions[..., None, None].astype(wide) * jnp.asarray(rotary.frequencies(), wide)  # [b, s, 1, dims / 2]
    cos, sin = jnp.cos(angle) * rotary.magnitude(), jnp.sin(angle) * (direction * rotary.magnitude())
    a, b = jnp.split(x[..., : rotary.dims].astype(wide), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., rotary.dims :]], axis=-1) if rotary.dims < x.shape[-1] else rotated
