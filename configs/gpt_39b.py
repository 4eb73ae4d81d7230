"""GPT 39.1B, two servers per replica, one after the other in a pipeline.

parameters   39,096,041,472 with the vocabulary padded to 51,200
hardware     512 GPUs, pipe 2 × data 32 × model 8; a global batch of 1,536 is 12 micro-batches of 4 on each replica; 24
             layers per stage
to beat      138 TFLOP/s per GPU, including recomputation, 44% of the peak of an A100; 103.8 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, fifth row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 13B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=48, hidden=8192, heads=64, sequence=2048),
    mesh=MeshConfig(pipe=2, data=32, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=1e-4, min_learning_rate=1e-5, warmup_steps=119, decay_steps=82_652, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=95_367, global_batch=1536, micro_batch=4, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
