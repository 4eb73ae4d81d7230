"""A run of seconds, for tests of the command line."""

from mjax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    GPTConfig,
    LogConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)

config = Config(
    model=GPTConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=257, vocabulary_multiple=64),
    data=DataConfig(mock=True),
    optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(steps=12, global_batch=8, micro_batch=2, eval_interval=5, eval_batches=1),
    checkpoint=CheckpointConfig(interval=4, keep_last=2),
    log=LogConfig(tensorboard=False, sample_tokens=0),
)
