"""GPT 76.1B, four servers per replica, the first of the study with an interleaved pipeline.

parameters   76,050,739,200 with the vocabulary padded to 51,200
hardware     1,024 GPUs, pipe 4 × data 32 × model 8; a global batch of 1,792 is 28 micro-batches of 2 on each replica; 5
             layers in each of 3 virtual stages per device
to beat      140 TFLOP/s per GPU, including recomputation, 45% of the peak of an A100; 105.2 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, sixth row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 175B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B;
             init_std from Megatron's script for it (pretrain_gpt3_175B.sh)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=60, hidden=10240, heads=80, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=4, data=32, model=8, virtual_stages=3, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=102, decay_steps=70_844, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=81_744, global_batch=1792, micro_batch=2, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
