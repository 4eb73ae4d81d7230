"""A small mixture of experts on Wikipedia paragraphs, for two CPU cores: the tokens, steps and batches of llama_demo.

parameters   11,282,688; 4,204,800, per token about as many as llama_demo has
hardware     two CPU cores, six to nine minutes
result       validation perplexity 171.4 after the 1,024,000 tokens on which llama_demo reaches 178.1
             (with weights that add up to 1 rather than 2, router_scale, a token's experts are half an MLP: 191.7)
data         `mjax prepare --demo --output data/demo` (5 MB of text, 4,096 sentencepiece tokens)
"""

from mjax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MixtureConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)

config = Config(
    model=MixtureConfig(
        layers=4,
        hidden=256,
        heads=8,
        kv_heads=4,
        experts=8,
        experts_per_token=2,
        router_scale=2.0,
        moe_ffn_hidden=384,
        aux_loss_coef=0.01,
        z_loss=0.001,
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
