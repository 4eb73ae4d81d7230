"""GPT-3 175B on eight servers, with sequence parallelism and selective recomputation.

parameters   174,615,846,912 with the vocabulary padded to 51,200
hardware     64 GPUs, pipe 8 × data 1 × model 8; a global batch of 64 is 64 micro-batches of 1; 4 layers in each of 3
             virtual stages per device
to beat      13.75 s per step on A100s, 51.4% MFU: 160 model TFLOP/s per GPU
source       arXiv 2205.05198, tables 3 and 5, second row (fp16 on A100s: add --precision.compute fp16)
training     500 steps to measure speed, as in Megatron's scripts for such runs (sc21/CONFIG.sh); the paper gives no
             learning rate; this is GPT-3 175B's, the nearest (arXiv 2005.14165, table 2.1). To train, raise
             --mesh.data and --train.global-batch together, and take steps, warm-up and decay from gpt_175b
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=96, hidden=12288, heads=96, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=8, data=1, model=8, virtual_stages=3, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=3, decay_steps=320, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=500, global_batch=64, micro_batch=1, recompute="selective", eval_interval=0),
    checkpoint=CheckpointConfig(interval=0, keep_last=1),
)
