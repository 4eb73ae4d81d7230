"""Llama 2 7B.

parameters   6,738,415,616
hardware     8 GPUs, ZeRO-3 over data 8
source       arXiv 2307.09288, table 1 and section 2.2; Llama-2-7b on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=32,
        hidden=4096,
        heads=32,
        feed_forward=11008,
        sequence=4096,
        vocabulary=32000,
        vocabulary_multiple=128,
    ),
    mesh=MeshConfig(data=8, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=500_000, global_batch=1024, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
