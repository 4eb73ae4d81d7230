"""Gemma 3 4B, text only: 34 layers, five groups of six and four more.

parameters   3,880,099,328
hardware     8 GPUs, ZeRO-3 over data 8
source       arXiv 2503.19786, table 1; gemma-3-4b-pt on Hugging Face, whose table has 64 rows more, of its images; the
             optimizer is Llama 3's
"""

from mjax.config import CheckpointConfig, Config, MeshConfig, OptimizerConfig, TrainConfig
from mjax.models.gemma3.config import Gemma3Config

config = Config(
    model=Gemma3Config(
        layers=34,
        hidden=2560,
        heads=8,
        kv_heads=4,
        head_dim=256,
        feed_forward=10240,
        sequence=8192,
        vocabulary=262_144,
        vocabulary_multiple=128,
        window=1024,
        rope_scaling="linear",
        rope_factor=8.0,
        query_pre_attn_scalar=256,
    ),
    mesh=MeshConfig(data=8, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=500_000, global_batch=512, micro_batch=1, recompute="selective", loss_chunks=8),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
