"""Kimi K2.

parameters   1,026,408,232,448; 32,861,500,928 per token
hardware     2,048 GPUs, pipe 16 × data 128, experts over 64 ranks
source       arXiv 2507.20534, sections 2.3 and 2.5; Kimi-K2-Base on Hugging Face, before its extension by YaRN
"""

from mjax.config import CheckpointConfig, Config, DeepSeekConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=DeepSeekConfig(
        layers=61,
        hidden=7168,
        heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        feed_forward=18432,
        experts=384,
        experts_per_token=8,
        moe_ffn_hidden=2048,
        shared_expert_ffn_hidden=2048,
        first_dense_layers=1,
        router="sigmoid",
        router_scale=2.827,
        router_bias_update_rate=0.001,
        aux_loss_coef=0.001,
        sequence=4096,
        vocabulary=163840,
        vocabulary_multiple=128,
        rope_theta=50_000.0,
    ),
    mesh=MeshConfig(pipe=16, data=128, expert=64, zero=1),
    optimizer=OptimizerConfig(
        name="muon",
        learning_rate=2e-4,
        min_learning_rate=2e-5,
        schedule="wsd",
        warmup_steps=500,
        wsd_decay_steps=82_000,
        wsd_decay="linear",
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=231_000, global_batch=16384, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
