"""GPT 310.1B, sixteen servers per replica.

parameters   310,130,540,544 with the vocabulary padded to 51,200
hardware     1,920 GPUs, pipe 16 × data 15 × model 8; a global batch of 2,160 is 144 micro-batches of 1 on each replica;
             3 layers in each of 2 virtual stages per device
to beat      155 TFLOP/s per GPU, including recomputation, 50% of the peak of an A100; 116.3 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, eighth row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 175B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B;
             init_std from Megatron's script for it (pretrain_gpt3_175B.sh)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=96, hidden=16384, heads=128, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=16, data=15, model=8, virtual_stages=2, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=85, decay_steps=58_775, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=67_817, global_batch=2160, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
