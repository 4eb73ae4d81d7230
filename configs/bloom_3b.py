"""BLOOM 3B.

parameters   3,002,557,440 with 250,880 rows in the embedding. The tokenizer has 250,680 ids; the rows beyond took part
             in the softmax when the model was trained, so here they count as tokens too
hardware     128 GPUs, here pipe 2 × data 16 × model 4; a global batch of 512 is 32 micro-batches of 1. BigScience had
             128 V100s as pipe 4 × data 8 × model 4, with the embedding and the output layer counted as a layer each;
             four do not divide 30
source       arXiv 2211.05100, table 3; mesh, ramp-up, ZeRO-1 and initial weights from BigScience's script
             (tr11c-2B5-ml-continuation.slurm), dropout too, which is Megatron's default; fp16 on V100s: add
             --precision.compute fp16 with initial_loss_scale 4096 and loss_scale_window 500
training     in samples of 2,048 tokens: 341B tokens in all, batch ramp-up from 192 over 9,765,625 samples, warm-up over
             183,105 (375M tokens), cosine over 200M (410B), so that the end of the decay is never reached; the steps
             below are equivalent. Each of the 11 batch sizes is compiled once
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(
        layers=30,
        hidden=2560,
        heads=32,
        sequence=2048,
        positions="alibi",
        embedding_layernorm=True,
        vocabulary=250_880,
        init_std=0.0048,
    ),
    mesh=MeshConfig(pipe=2, data=16, model=4, sequence_parallel=True, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=1.6e-4,
        min_learning_rate=1e-5,
        warmup_steps=954,
        decay_steps=403_135,
        weight_decay=0.1,
        beta2=0.95,
    ),
    train=TrainConfig(
        steps=337_713,
        global_batch=512,
        batch_rampup=(192, 32, 9_765_625),
        micro_batch=1,
        recompute="full",
        eval_batches=1,
    ),
    checkpoint=CheckpointConfig(interval=250, keep_last=2, keep_every=10_000),
)
