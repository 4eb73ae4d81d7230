"""GPT-2 1.2B, one GPU per replica.

parameters   1,212,103,680 with the vocabulary padded to 50,304, Megatron's multiple for this model; 1,213,479,936 at
             51,200 (vocabulary_multiple 1024)
hardware     64 GPUs, data 64 (the paper: 39 TFLOP/s on one V100)
source       arXiv 1909.08053, table 1, first row; section 5.1 for the hyperparameters (fp16 on V100: add
             --precision.compute fp16)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=40, hidden=1536, heads=16, vocabulary_multiple=128),
    mesh=MeshConfig(data=64, model=1),
    optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=3_000, weight_decay=0.01),
    train=TrainConfig(steps=300_000, global_batch=512, micro_batch=8, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
