"""GPT-2 4.2B, four GPUs per replica.

parameters   4,197,929,472 with the vocabulary padded to 50,688, Megatron's multiple for this model; 4,199,109,120 at
             51,200 (vocabulary_multiple 1024)
hardware     256 GPUs, data 64 × model 4
source       arXiv 1909.08053, table 1, third row; section 5.1 for the hyperparameters (fp16 on V100: add
             --precision.compute fp16)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=64, hidden=2304, heads=24, vocabulary_multiple=512),
    mesh=MeshConfig(data=64, model=4, sequence_parallel=True),
    optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=3_000, weight_decay=0.01),
    train=TrainConfig(steps=300_000, global_batch=512, micro_batch=8, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
