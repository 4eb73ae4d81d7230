"""GPT-2 8.3B with the 24 heads of the fully trained model.

parameters   8,317,040,640 with the vocabulary padded to 51,200
hardware     512 GPUs, data 64 × model 8; the paper took 2.10 days for 68,507 steps on V100s
source       arXiv 1909.08053, table 2, expected zero-shot WikiText103 perplexity 10.81, LAMBADA 66.51%, validation
             perplexity 9.27; section 5.1 for the hyperparameters (fp16 on V100: add --precision.compute fp16)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=72, hidden=3072, heads=24),
    mesh=MeshConfig(data=64, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=3_000, weight_decay=0.01),
    train=TrainConfig(steps=300_000, global_batch=512, micro_batch=8, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
