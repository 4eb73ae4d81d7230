"""The CPU reference case: the character-level GPT of nanoGPT, 10.7 million parameters, in float32 without dropout.

Small enough to measure on any machine, large enough that matrix products take most of the step. The vocabulary of 65
is left unpadded, as the peers have it.
"""

from mjax.config import Config, DataConfig, GPTConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig

config = Config(
    model=GPTConfig(
        layers=6,
        hidden=384,
        heads=6,
        sequence=256,
        vocabulary=65,
        vocabulary_multiple=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    mesh=MeshConfig(),
    data=DataConfig(mock=True),
    optimizer=OptimizerConfig(learning_rate=1e-3, min_learning_rate=1e-4, weight_decay=0.1, beta2=0.99),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(steps=5_000, global_batch=12, micro_batch=12),
)
