"""Names that the step puts on its equations (`jax.named_scope`), so that one can say where in the model something comes
from: in the communication ledger (`planner/comms.py`), in a profile, in the metadata of a compiled program.

JAX keeps the names through differentiation: what the backward pass of `layer` does is named `transpose(jvp(layer))`,
and what it computes again has `rematted_computation` in its name.
"""

from __future__ import annotations

EMBEDDING = "embedding"
LAYER = "layer"
HEAD = "head"  # final LayerNorm, logits, cross entropy
WEIGHTS = "weights"  # put together from their shards
GRADIENT = "gradient"  # summed over replicas, and over stages
OPTIMIZER = "optimizer"  # norm of the gradient, Adam
LOSS = "loss"  # figures that are reported, and the number of labels
PIPELINE = "pipeline"  # messages between stages

PARTS = (EMBEDDING, LAYER, HEAD, WEIGHTS, GRADIENT, OPTIMIZER, LOSS, PIPELINE)

# Conditionals of a pipeline's tick, which the schedule's table decides (`schedules.Schedule.runs`): the three passes,
# and those parts of them that belong to the first or the last virtual stage alone.
F, B, W = "F", "B", "W"
F_FIRST, F_LAST, B_FIRST, B_LAST = "F_first", "F_last", "B_first", "B_last"
