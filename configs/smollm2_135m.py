"""SmolLM2 135M, with the length and the positions of its last stage.

parameters   134,515,008
hardware     1 GPU
source       arXiv 2502.02737, section 6; SmolLM2-135M on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        feed_forward=1536,
        sequence=8192,
        vocabulary=49152,
        vocabulary_multiple=128,
        init_std=1 / 24,
        tie_embeddings=True,
        rope_theta=100_000.0,
    ),
    mesh=MeshConfig(data=1),
    optimizer=OptimizerConfig(
        learning_rate=3e-3,
        min_learning_rate=1e-5,
        schedule="wsd",
        wsd_decay="linear",
        warmup_steps=2_000,
        beta2=0.95,
        weight_decay=0.01,
    ),
    train=TrainConfig(steps=1_000_000, global_batch=128, micro_batch=4, recompute="none"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2),
)
