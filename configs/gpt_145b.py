"""GPT 145.6B, eight servers per replica.

parameters   145,622,261,760 with the vocabulary padded to 51,200
hardware     1,536 GPUs, pipe 8 × data 24 × model 8; a global batch of 2,304 is 48 micro-batches of 2 on each replica; 5
             layers in each of 2 virtual stages per device
to beat      148 TFLOP/s per GPU, including recomputation, 47% of the peak of an A100; 111.1 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, seventh row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 175B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B;
             init_std from Megatron's script for it (pretrain_gpt3_175B.sh)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=80, hidden=12288, heads=96, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=8, data=24, model=8, virtual_stages=2, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=79, decay_steps=55_101, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=63_578, global_batch=2304, micro_batch=2, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
