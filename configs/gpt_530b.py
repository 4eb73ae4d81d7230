"""GPT 529.6B, 35 servers per replica, one layer in each virtual stage.

parameters   529,600,819,200 with the vocabulary padded to 51,200
hardware     2,520 GPUs, pipe 35 × data 9 × model 8; a global batch of 2,520 is 280 micro-batches of 1 on each replica;
             1 layer in each of 3 virtual stages per device
to beat      163 TFLOP/s per GPU, including recomputation, 52% of the peak of an A100; 122.3 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, ninth row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 175B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B;
             init_std from Megatron's script for it (pretrain_gpt3_175B.sh)
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=105, hidden=20480, heads=128, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=35, data=9, model=8, virtual_stages=3, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=73, decay_steps=50_378, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=58_129, global_batch=2520, micro_batch=1, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
