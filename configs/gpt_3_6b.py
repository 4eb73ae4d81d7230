"""GPT 3.6B, two GPUs per replica.

parameters   3,562,168,320 with the vocabulary padded to 51,200
hardware     64 GPUs, data 32 × model 2; a global batch of 512 is 1 micro-batch of 16 on each replica
to beat      138 TFLOP/s per GPU, including recomputation, 44% of the peak of an A100; 104.5 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, second row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 2.7B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=30, hidden=3072, heads=32, sequence=2048),
    mesh=MeshConfig(data=32, model=2, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=1.6e-4,
        min_learning_rate=1.6e-5,
        warmup_steps=358,
        decay_steps=247_955,
        weight_decay=0.1,
        beta2=0.95,
    ),
    train=TrainConfig(steps=286_102, global_batch=512, micro_batch=16, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
