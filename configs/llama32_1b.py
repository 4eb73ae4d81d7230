"""Llama 3.2 1B.

parameters   1,235,814,400
hardware     8 GPUs, data 8
source       Llama-3.2-1B on Hugging Face, whose positions are scaled for 131,072 tokens
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        feed_forward=8192,
        sequence=8192,
        vocabulary=128256,
        vocabulary_multiple=128,
        tie_embeddings=True,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=32.0,
        rope_original_length=8192,
    ),
    mesh=MeshConfig(data=8, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=100_000, global_batch=256, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
