"""GPT of a trillion parameters, 64 servers per replica, two layers in each stage.

parameters   1,008,038,758,400 with the vocabulary padded to 51,200
hardware     3,072 GPUs, pipe 64 × data 6 × model 8; a global batch of 3,072 is 512 micro-batches of 1 on each replica;
             2 layers per stage
to beat      163 TFLOP/s per GPU, including recomputation, 52% of the peak of an A100; 122.3 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, tenth row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 175B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B;
             init_std from Megatron's script for it (pretrain_gpt3_175B.sh)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=128, hidden=25600, heads=160, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=64, data=6, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=60, decay_steps=41_326, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=47_684, global_batch=3072, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
