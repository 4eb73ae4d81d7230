"""GPT-2 2.5B, two GPUs per replica.

parameters   2,488,934,400 with the vocabulary padded to 50,432, Megatron's multiple for this model; 2,490,408,960 at
             51,200 (vocabulary_multiple 1024)
hardware     128 GPUs, data 64 × model 2; the paper took 2.27 days for 68,507 steps on V100s
source       arXiv 1909.08053, tables 1 and 2, expected zero-shot WikiText103 perplexity 12.76, LAMBADA 61.73%; section
             5.1 for the hyperparameters (fp16 on V100: add --precision.compute fp16)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=54, hidden=1920, heads=20, vocabulary_multiple=256),
    mesh=MeshConfig(data=64, model=2, sequence_parallel=True),
    optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=3_000, weight_decay=0.01),
    train=TrainConfig(steps=300_000, global_batch=512, micro_batch=8, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
