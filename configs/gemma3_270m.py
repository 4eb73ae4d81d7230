"""Gemma 3 270M.

parameters   268,098,176
hardware     1 GPU
source       arXiv 2503.19786; gemma-3-270m on Hugging Face; the optimizer is Llama 3's
"""

from mjax.config import CheckpointConfig, Config, OptimizerConfig, TrainConfig
from mjax.models.gemma3.config import Gemma3Config

config = Config(
    model=Gemma3Config(
        layers=18,
        hidden=640,
        heads=4,
        kv_heads=1,
        head_dim=256,
        feed_forward=2048,
        sequence=4096,
        vocabulary=262_144,
        vocabulary_multiple=128,
        window=512,
        query_pre_attn_scalar=256,
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3,
        min_learning_rate=1e-4,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_000_000, global_batch=128, micro_batch=1, recompute="selective", loss_chunks=8),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
