"""DeepSeek-V2-Lite.

parameters   15,706,484,224; 2,661,150,208 per token
hardware     64 GPUs, FSDP over data 64
source       arXiv 2405.04434, appendix B; DeepSeek-V2-Lite on Hugging Face, before its extension by YaRN
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
        feed_forward=10944,
        experts=64,
        experts_per_token=6,
        moe_ffn_hidden=1408,
        shared_expert_ffn_hidden=2816,
        first_dense_layers=1,
        router="softmax",
        router_normalized=False,
        aux_loss_coef=0.001,
        sequence=4096,
        vocabulary=102400,
        vocabulary_multiple=128,
        init_std=0.006,
    ),
    mesh=MeshConfig(data=64, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=4.2e-4,
        min_learning_rate=4.2e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=302_000, global_batch=4608, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
