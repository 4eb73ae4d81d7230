"""GPT 7.5B, four GPUs per replica.

parameters   7,467,786,240 with the vocabulary padded to 51,200
hardware     128 GPUs, data 32 × model 4; a global batch of 512 is 1 micro-batch of 16 on each replica
to beat      142 TFLOP/s per GPU, including recomputation, 46% of the peak of an A100; 107.2 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, third row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 6.7B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=36, hidden=4096, heads=32, sequence=2048),
    mesh=MeshConfig(data=32, model=4, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=1.2e-4,
        min_learning_rate=1.2e-5,
        warmup_steps=358,
        decay_steps=247_955,
        weight_decay=0.1,
        beta2=0.95,
    ),
    train=TrainConfig(steps=286_102, global_batch=512, micro_batch=16, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=50_000),
)
