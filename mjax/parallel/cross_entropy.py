"""Cross entropy over a split vocabulary: each rank has v/t rows of the table that scores tokens, and computes only
these logits (arXiv 1909.08053, section 3).

    −log softmax(x Eᵀ)[label] = log Σ_j exp(x · E_j − m) + m − x · E_label,     m = max_j x · E_j

Only m, the sum of total and the label's logit are communicated over the model axis: three numbers per token instead of
v. The logits [b·s, v / t] and their gradient are in memory; `chunked_cross_entropy.py` stores neither.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.parallel import mappings
from mjax.parallel.layers import to_local_ids
from mjax.parallel.reductions import accumulation_dtype


@jax.custom_vjp
def vocab_parallel_cross_entropy(logits: Float[Array, "t v_local"], labels: Int[Array, " t"]) -> Float[Array, " t"]:
    """Cross entropy −log softmax(logits)[label] when each rank has v/t of the logits (arXiv 1909.08053, section 3).

    The only copy of the logits saved for the backward pass has the compute dtype.

    Returns:
      The loss in float32 or wider, the same on every rank of `model`.
    """
    return _cross_entropy_forward(logits, labels)[0]


def _cross_entropy_forward(logits: Array, labels: Array):
    wide = logits.astype(accumulation_dtype(logits.dtype))
    largest = mappings.pmax(wide.max(-1))  # [b·s]
    local, is_local = to_local_ids(labels, logits.shape[-1])
    label_logit = jnp.take_along_axis(wide, local[..., None], -1)[..., 0]
    label_logit = jnp.where(is_local, label_logit - largest, 0.0)
    total = jnp.exp(wide - largest[..., None]).sum(-1)
    total, label_logit = mappings.reduce_from_region(jnp.stack([total, label_logit]))
    log_sum = jnp.log(total)
    return log_sum - label_logit, (logits, largest + log_sum, labels)


def _cross_entropy_backward(residuals, gradient: Array):
    logits, log_normalizer, labels = residuals
    wide = logits.astype(log_normalizer.dtype)
    probabilities = jnp.exp(wide - log_normalizer[..., None])
    local, is_local = to_local_ids(labels, logits.shape[-1])
    column = jnp.arange(logits.shape[-1], dtype=local.dtype)
    is_label = is_local[..., None] & (column == local[..., None])
    return ((probabilities - is_label) * gradient[..., None]).astype(logits.dtype), None


vocab_parallel_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
