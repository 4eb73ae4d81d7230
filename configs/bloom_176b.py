"""BLOOM 176B, the model the others are small versions of.

parameters   176,247,271,424 with 250,880 rows in the embedding. The tokenizer has 250,680 ids; the rows beyond took
             part in the softmax when the model was trained, so here they count as tokens too
hardware     320 GPUs, here pipe 10 × data 8 × model 4; a global batch of 2,048 is 128 micro-batches of 2 on each
             replica; 7 layers per stage. BigScience had 384 A100s as pipe 12 × data 8 × model 4, with the embedding and
             the output layer counted as a layer each; twelve do not divide 70
source       arXiv 2211.05100, table 3; mesh, ramp-up, ZeRO-1 and initial weights from BigScience's script
             (tr11-176B-ml.slurm), dropout too, which is Megatron's default
training     in samples of 2,048 tokens: 366B tokens in all, batch ramp-up from 192 over 9,765,625 samples, warm-up over
             183,105 (375M tokens), cosine over 200M (410B), so that the end of the decay is never reached; the steps
             below are equivalent. Each of the 117 batch sizes is compiled once
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(
        layers=70,
        hidden=14336,
        heads=112,
        sequence=2048,
        positions="alibi",
        embedding_layernorm=True,
        vocabulary=250_880,
        init_std=0.0048,
    ),
    mesh=MeshConfig(pipe=10, data=8, model=4, sequence_parallel=True, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=6e-5,
        min_learning_rate=6e-6,
        warmup_steps=910,
        decay_steps=105_546,
        weight_decay=0.1,
        beta2=0.95,
    ),
    train=TrainConfig(
        steps=95_151,
        global_batch=2048,
        batch_rampup=(192, 16, 9_765_625),
        micro_batch=2,
        recompute="full",
        eval_batches=1,
    ),
    checkpoint=CheckpointConfig(interval=100, keep_last=2, keep_every=10_000),
)
