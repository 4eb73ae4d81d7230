"""BLOOM 560M: the smallest, whose embedding is nearly half of it.

parameters   559,214,592 with 250,880 rows in the embedding. The tokenizer has 250,680 ids; the rows beyond took part in
             the softmax when the model was trained, so here they count as tokens too
hardware     32 GPUs, data 32, one a replica, as BigScience's V100s; a global batch of 256 is 8 micro-batches of 1
source       arXiv 2211.05100, table 3; mesh, ramp-up, ZeRO-1 and initial weights from BigScience's script
             (tr11e-350M-ml-continuation.slurm), dropout too, which is Megatron's default; fp16 on V100s: add
             --precision.compute fp16 with initial_loss_scale 4096 and loss_scale_window 500
training     in samples of 2,048 tokens: 341B tokens in all, batch ramp-up from 192 over 9,765,625 samples, warm-up over
             183,105 (375M tokens), cosine over 200M (410B), so that the end of the decay is never reached; the steps
             below are equivalent. Each of the 3 batch sizes is compiled once
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(
        layers=24,
        hidden=1024,
        heads=16,
        sequence=2048,
        positions="alibi",
        embedding_layernorm=True,
        vocabulary=250_880,
        init_std=0.0048,
    ),
    mesh=MeshConfig(data=32, zero=1),
    optimizer=OptimizerConfig(
        learning_rate=3e-4,
        min_learning_rate=1e-5,
        warmup_steps=954,
        decay_steps=790_333,
        weight_decay=0.1,
        beta2=0.95,
    ),
    train=TrainConfig(
        steps=659_489,
        global_batch=256,
        batch_rampup=(192, 32, 9_765_625),
        micro_batch=1,
        eval_batches=1,
    ),
    checkpoint=CheckpointConfig(interval=250, keep_last=2, keep_every=10_000),
)
