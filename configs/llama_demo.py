"""A small Llama on Wikipedia paragraphs, for two CPU cores: the tokens, steps and batches of gpt_demo.

parameters   4,196,608, gpt_demo's but for its positions and biases
hardware     two CPU cores, about three minutes; `make train` has 180 of its steps, with Muon
result       validation perplexity 178.1 after the 1,024,000 tokens on which gpt_demo reaches 217.1
data         `mjax prepare --demo --output data/demo` (5 MB of text, 4,096 sentencepiece tokens)
"""

from mjax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LlamaConfig,
    LogConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)

config = Config(
    model=LlamaConfig(
        layers=4,
        hidden=256,
        heads=8,
        kv_heads=4,
        feed_forward=768,
        sequence=128,
        vocabulary=4096,
        tie_embeddings=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    ),
    data=DataConfig(path=("data/demo",), split="95,5,0"),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=50, weight_decay=0.1, beta2=0.99
    ),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(steps=250, global_batch=32, micro_batch=8, eval_interval=50, eval_batches=5),
    checkpoint=CheckpointConfig(interval=50, keep_last=2),
    log=LogConfig(prompt="The city of"),
)
