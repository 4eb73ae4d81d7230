"""Qwen 2.5 7B.

parameters   7,615,616,512
hardware     8 GPUs, ZeRO-3 over data 8
source       arXiv 2412.15115, table 1; Qwen2.5-7B on Hugging Face; the optimizer is Llama 3's
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        feed_forward=18944,
        sequence=4096,
        vocabulary=152064,
        vocabulary_multiple=128,
        qkv_bias=True,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
    ),
    mesh=MeshConfig(data=8, zero=3),
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
