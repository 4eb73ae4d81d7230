"""Mistral 7B, the first version, with a sliding window.

parameters   7,241,732,096
hardware     8 GPUs, ZeRO-3 over data 8
source       arXiv 2310.06825, table 1; Mistral-7B-v0.1 on Hugging Face; the optimizer is Llama 2's
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        sequence=8192,
        vocabulary=32000,
        vocabulary_multiple=128,
        window=4096,
    ),
    mesh=MeshConfig(data=8, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=500_000, global_batch=512, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
