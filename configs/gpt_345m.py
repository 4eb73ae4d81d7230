"""GPT-2 345M: the smallest model of the paper, and the shape of the published Megatron checkpoint.

parameters   354,871,296 (vocabulary padded to 50,304, as in the published checkpoint)
hardware     64 GPUs, data 64; the paper took 0.86 days for 68,507 steps on V100s
source       arXiv 1909.08053, table 2 (355M), expected zero-shot WikiText103 perplexity 19.31, LAMBADA 45.18%; section
             5.1 for the hyperparameters (fp16 on V100: add --precision.compute fp16)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=24, hidden=1024, heads=16, vocabulary_multiple=128),
    mesh=MeshConfig(data=64, model=1),
    optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=3_000, weight_decay=0.01),
    train=TrainConfig(steps=300_000, global_batch=512, micro_batch=8, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
