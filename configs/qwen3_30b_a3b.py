"""Qwen 3 30B-A3B.

parameters   30,532,122,624; 3,353,032,704 per token
hardware     64 GPUs, FSDP over data 64
source       arXiv 2505.09388, table 2; Qwen3-30B-A3B on Hugging Face; the optimizer is Llama 3's
"""

from mjax.config import CheckpointConfig, Config, MeshConfig, MixtureConfig, OptimizerConfig, TrainConfig

config = Config(
    model=MixtureConfig(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        experts_per_token=8,
        moe_ffn_hidden=768,
        aux_loss_coef=0.001,
        sequence=4096,
        vocabulary=151936,
        vocabulary_multiple=128,
        qk_norm="head",
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
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
