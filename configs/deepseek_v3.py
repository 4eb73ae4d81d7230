"""DeepSeek-V3.

parameters   682,636,487,424; 38,240,398,080 per token
hardware     2,048 GPUs, pipe 16 × data 128, experts over 64 ranks
source       arXiv 2412.19437, section 4.2; DeepSeek-V3-Base on Hugging Face, before its extension by YaRN
"""

from mjax.config import CheckpointConfig, Config, DeepSeekConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=DeepSeekConfig(
        layers=61,
        hidden=7168,
        heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        feed_forward=18432,
        experts=256,
        experts_per_token=8,
        moe_ffn_hidden=2048,
        shared_expert_ffn_hidden=2048,
        first_dense_layers=3,
        router="sigmoid",
        router_n_groups=8,
        router_topk_groups=4,
        router_scale=2.5,
        router_bias_update_rate=0.001,
        aux_loss_coef=0.0001,
        mtp_layers=1,
        sequence=4096,
        vocabulary=129280,
        vocabulary_multiple=128,
        init_std=0.006,
    ),
    mesh=MeshConfig(pipe=16, data=128, expert=64, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=2.2e-4,
        min_learning_rate=2.2e-5,
        schedule="wsd",
        warmup_steps=2_000,
        wsd_decay_steps=68_000,
        wsd_decay="linear",
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=235_000, global_batch=15360, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
