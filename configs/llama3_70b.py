"""Llama 3 70B.

parameters   70,553,706,496
hardware     128 GPUs, pipe 4 × data 4 × model 8
source       arXiv 2407.21783, table 3; Meta-Llama-3-70B on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        feed_forward=28672,
        sequence=8192,
        vocabulary=128256,
        vocabulary_multiple=128,
        rope_theta=500_000.0,
    ),
    mesh=MeshConfig(pipe=4, data=4, model=8, sequence_parallel=True, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=1.5e-4,
        min_learning_rate=1.5e-5,
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_000_000, global_batch=1024, micro_batch=1, recompute="selective"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
