"""GPT of a trillion parameters on 64 servers, with sequence parallelism and selective recomputation.

parameters   1,008,038,758,400 with the vocabulary padded to 51,200
hardware     512 GPUs, pipe 64 × data 1 × model 8; a global batch of 512 is 512 micro-batches of 1; 2 layers per stage
to beat      71.49 s per step on A100s, 56.3% MFU: 176 model TFLOP/s per GPU
source       arXiv 2205.05198, tables 3 and 5, fourth row (fp16 on A100s: add --precision.compute fp16)
training     500 steps to measure speed, as in Megatron's scripts for such runs (sc21/CONFIG.sh); the paper gives no
             learning rate; this is GPT-3 175B's, the nearest (arXiv 2005.14165, table 2.1). To train, raise
             --mesh.data and --train.global-batch together, and take steps, warm-up and decay from gpt_1t
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=128, hidden=25600, heads=160, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=64, data=1, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=3, decay_steps=320, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=500, global_batch=512, micro_batch=1, recompute="selective", eval_interval=0),
    checkpoint=CheckpointConfig(interval=0, keep_last=1),
)
