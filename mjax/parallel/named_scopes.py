"""Names of the step's parts (`jax.named_scope`), which appear in the communication ledger (`planner/ledger.py`), in a
profile and in the metadata of a compiled program.

JAX keeps the names through differentiation: the backward pass of `layer` is named `transpose(jvp(layer))`, and
recomputation has `rematted_computation` in its name.
"""

EMBEDDING = "embedding"
LAYER = "layer"
HEAD = "head"  # final LayerNorm, logits, cross entropy
WEIGHTS = "weights"  # gathered from their shards
GRADIENT = "gradient"  # summed over replicas, and over stages
OPTIMIZER = "optimizer"  # gradient norm, the update
LOSS = "loss"  # reported metrics, and the number of labels
PIPELINE = "pipeline"  # send/recv of stages

ATTENTION = "attention"  # within a layer: scores, softmax and weighted sum, or the kernel that fuses them
GROUPED = "grouped_products"  # within a layer: those of the experts
ROUNDS = "rounds"  # within a layer: all-to-alls to the experts after the first, none if the router is balanced

PARTS = (EMBEDDING, LAYER, HEAD, WEIGHTS, GRADIENT, OPTIMIZER, LOSS, PIPELINE)

# Conditionals of a pipeline's tick, as `PipelineSchedule.runs` counts them: the two passes, and their parts that belong
# to the first or the last virtual stage only.
F, B = "F", "B"
F_FIRST, F_LAST, B_FIRST, B_LAST = "F_first", "F_last", "B_first", "B_last"
