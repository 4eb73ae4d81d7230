"""Llama 3.1 8B at its full length: training continues with sequences of 131,072 tokens.

parameters   8,030,261,248
hardware     8 GPUs of 80 GB, context 8, ZeRO-3 over it
source       arXiv 2407.21783, section 3.4.2 (long context); Llama-3.1-8B on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        sequence=131_072,
        vocabulary=128256,
        vocabulary_multiple=128,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_length=8192,
    ),
    mesh=MeshConfig(context=8, zero=3),
    optimizer=OptimizerConfig(
        learning_rate=1e-5,
        min_learning_rate=1e-6,
        warmup_steps=50,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=2_000, global_batch=32, micro_batch=1, recompute="full", loss_chunks=8),
    checkpoint=CheckpointConfig(interval=100, keep_last=2),
)
