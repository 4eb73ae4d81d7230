"""BERT 1.3B.

parameters   1,281,001,474 with the vocabulary of BERT's uncased WordPieces padded to 30,720
hardware     256 GPUs, here data 128 × model 2: the paper does not say how it divided them
source       arXiv 1909.08053, table 4 (1.3B), expected perplexity of masked tokens on held-out text 1.30; section 4.2
             for the hyperparameters. The paper gives no minimum learning rate; 1e-5 is from Megatron's script.
"""

from mjax.config import BERTConfig, CheckpointConfig, Config, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=BERTConfig(layers=24, hidden=2048, heads=32, sequence=512, vocabulary=30522),
    mesh=MeshConfig(data=128, model=2, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=1e-4, min_learning_rate=1e-5, schedule="linear", warmup_steps=10_000, weight_decay=0.01
    ),
    train=TrainConfig(steps=2_000_000, global_batch=1024, micro_batch=8),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=100_000),
)
