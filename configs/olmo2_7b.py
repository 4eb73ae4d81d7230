"""OLMo 2 7B.

parameters   7,298,617,344
hardware     8 GPUs, ZeRO-3 over data 8
source       arXiv 2501.00656, tables 3 and 4; OLMo-2-1124-7B on Hugging Face
"""

from mjax.config import CheckpointConfig, Config, LlamaConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=LlamaConfig(
        layers=32,
        hidden=4096,
        heads=32,
        feed_forward=11008,
        sequence=4096,
        vocabulary=100352,
        vocabulary_multiple=128,
        norms="post",
        qk_norm="heads",
        rope_theta=500_000.0,
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
