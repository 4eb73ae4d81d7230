"""GPT 18.4B, one server of eight GPUs per replica.

parameters   18,449,756,160 with the vocabulary padded to 51,200
hardware     256 GPUs, data 32 × model 8; a global batch of 1,024 is 4 micro-batches of 8 on each replica
to beat      135 TFLOP/s per GPU, including recomputation, 43% of the peak of an A100; 101.7 model TFLOP/s, as mjax
             counts them
source       arXiv 2104.04473, table 1, fourth row (fp16 on A100s: add --precision.compute fp16)
training     the paper gives no learning rate, betas or weight decay; these are of GPT-3 13B, the nearest (arXiv
             2005.14165, table 2.1 and appendix B): 300B tokens, warm-up over 375M, cosine to a tenth over 260B
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=40, hidden=6144, heads=48, sequence=2048),
    mesh=MeshConfig(data=32, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=1e-4, min_learning_rate=1e-5, warmup_steps=179, decay_steps=123_978, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=143_051, global_batch=1024, micro_batch=8, recompute="full"),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
