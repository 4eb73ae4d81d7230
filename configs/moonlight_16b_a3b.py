"""Moonlight 16B-A3B.

parameters   15,960,110,208; 2,914,776,192 per token
hardware     64 GPUs, FSDP over data 64
source       arXiv 2502.16982, section 3.3; Moonlight-16B-A3B on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, DeepSeekConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=DeepSeekConfig(
        layers=27,
        hidden=2048,
        heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        feed_forward=11264,
        experts=64,
        experts_per_token=6,
        moe_ffn_hidden=1408,
        shared_expert_ffn_hidden=2816,
        first_dense_layers=1,
        router="sigmoid",
        router_scale=2.446,
        router_bias_update_rate=0.001,
        aux_loss_coef=0.001,
        sequence=8192,
        vocabulary=163840,
        vocabulary_multiple=128,
        rope_theta=50_000.0,
        norm_epsilon=1e-5,
    ),
    mesh=MeshConfig(data=64, zero=3),
    optimizer=OptimizerConfig(
        name="muon",
        learning_rate=4.2e-4,
        min_learning_rate=4.2e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=170_000, global_batch=4096, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
