"""A small BERT on Wikipedia paragraphs, for two CPU cores: `make bert`.

parameters   698,882
hardware     two CPU cores; 26 minutes on a loaded machine
data         `mjax prepare --demo --output data/bert_demo --tokenizer bert-uncased --split-sentences
             --no-append-eod` (5 MB of text, 2,048 WordPieces)
expected     on held-out text 5.19 nats per masked token, 5.90 by frequency alone; order of 68% of the pairs
             (docs/guides/bert.md)
"""

from mjax.config import BERTConfig, CheckpointConfig, Config, DataConfig, OptimizerConfig, PrecisionConfig, TrainConfig

config = Config(
    model=BERTConfig(
        layernorm="post",  # with which the order is learned sooner in so small a model
        layers=2,
        hidden=128,
        heads=4,
        sequence=32,
        vocabulary=2048,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_std=0.08,  # 0.02 is for a width of 1,024; here every attention would begin as an average
    ),
    data=DataConfig(path=("data/bert_demo",), split="90,10,0"),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, min_learning_rate=1e-5, schedule="linear", warmup_steps=100, weight_decay=0.01, beta2=0.98
    ),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(steps=2000, global_batch=64, micro_batch=32, eval_interval=200, eval_batches=22),
    checkpoint=CheckpointConfig(interval=200, keep_last=2),
)
