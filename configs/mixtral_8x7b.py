"""Mixtral 8x7B.

parameters   46,702,792,704; 12,879,925,248 per token
hardware     64 GPUs, FSDP over data 64
source       arXiv 2401.04088, table 1; Mixtral-8x7B-v0.1 on Hugging Face; the optimizer is Llama 3's
"""

from mjax.config import CheckpointConfig, Config, MeshConfig, MixtureConfig, OptimizerConfig, TrainConfig

config = Config(
    model=MixtureConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        experts=8,
        experts_per_token=2,
        feed_forward=14336,
        aux_loss_coef=0.02,
        sequence=4096,
        vocabulary=32000,
        vocabulary_multiple=128,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-5,
    ),
    mesh=MeshConfig(data=64, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_000_000, global_batch=1024, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
