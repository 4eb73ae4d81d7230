"""Llama 3.1 405B.

parameters   405,853,388,800
hardware     16,384 GPUs in the paper; here 1,152, pipe 18 × data 8 × model 8
source       arXiv 2407.21783, table 3 and section 3.3.2; Llama-3.1-405B on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        feed_forward=53248,
        sequence=8192,
        vocabulary=128256,
        vocabulary_multiple=128,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_length=8192,
    ),
    mesh=MeshConfig(pipe=18, data=8, model=8, sequence_parallel=True, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=8e-5,
        min_learning_rate=8e-7,
        warmup_steps=8_000,
        beta2=0.95,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=1_200_000, global_batch=1152, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
