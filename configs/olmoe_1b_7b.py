"""OLMoE 1B-7B.

parameters   6,919,161,856; 1,282,017,280 per token
hardware     64 GPUs, ZeRO-1 over data 64
source       arXiv 2409.02060, table 10; OLMoE-1B-7B-0924 on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, MeshConfig, MixtureConfig, OptimizerConfig, TrainConfig

config = Config(
    model=MixtureConfig(
        layers=16,
        hidden=2048,
        heads=16,
        experts=64,
        experts_per_token=8,
        moe_ffn_hidden=1024,
        router_normalized=False,
        aux_loss_coef=0.01,
        z_loss=0.001,
        sequence=4096,
        vocabulary=50304,
        vocabulary_multiple=128,
        qk_norm="heads",
        norm_epsilon=1e-5,
    ),
    mesh=MeshConfig(data=64, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=4e-4,
        min_learning_rate=4e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_200_000, global_batch=1024, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
