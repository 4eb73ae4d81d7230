"""Qwen 3 0.6B.

parameters   596,049,920
hardware     8 GPUs, data 8
source       arXiv 2505.09388, table 1; Qwen3-0.6B on Hugging Face; the optimizer is Llama 3's
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        feed_forward=3072,
        sequence=4096,
        vocabulary=151936,
        vocabulary_multiple=128,
        qk_norm="head",
        tie_embeddings=True,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
    ),
    mesh=MeshConfig(data=8, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_000_000, global_batch=1024, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
