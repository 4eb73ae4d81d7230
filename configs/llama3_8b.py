"""Llama 3 8B.

parameters   8,030,261,248
hardware     8 GPUs, ZeRO-3 over data 8
source       arXiv 2407.21783, table 3; Meta-Llama-3-8B on Hugging Face (3.1 has --model.rope-scaling llama3
             --model.rope-factor 8 --model.rope-original-length 8192)
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        sequence=8192,
        vocabulary=128256,
        vocabulary_multiple=128,
        rope_theta=500_000.0,
    ),
    mesh=MeshConfig(data=8, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_000_000, global_batch=512, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
