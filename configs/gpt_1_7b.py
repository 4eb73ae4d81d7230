"""GPT 1.7B, the smallest of the weak-scaling study: one GPU per replica.

parameters   1,652,230,656 with the vocabulary padded to 51,200
hardware     32 GPUs, data 32 × model 1; a global batch of 512 is 1 micro-batch of 16 on each replica
to beat      137 TFLOP/s per GPU, including recomputation, 44% of the peak of an A100; 104.4 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, first row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 1.3B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=24, hidden=2304, heads=24, sequence=2048),
    mesh=MeshConfig(data=32, model=1),
    optimizer=OptimizerConfig(
        learning_rate=2e-4, min_learning_rate=2e-5, warmup_steps=358, decay_steps=247_955, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=286_102, global_batch=512, micro_batch=16, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
