"""GPT 22B on one server, with sequence parallelism and selective recomputation.

parameters   22,074,273,792 with the vocabulary padded to 51,200
hardware     8 GPUs, data 1 × model 8; a global batch of 4 is 1 micro-batch of 4
to beat      1.10 s per step on A100s, 41.5% MFU: 130 model TFLOP/s per GPU
source       arXiv 2205.05198, tables 3 and 5, first row (fp16 on A100s: add --precision.compute fp16)
training     500 steps to measure speed, as in Megatron's scripts for such runs (sc21/CONFIG.sh); the paper gives no
             learning rate; this is GPT-3 13B's, the nearest (arXiv 2005.14165, table 2.1). To train, raise
             --mesh.data and --train.global-batch together, and take steps, warm-up and decay from gpt_18b
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=48, hidden=6144, heads=64, sequence=2048),
    mesh=MeshConfig(data=1, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=1e-4, min_learning_rate=1e-5, warmup_steps=3, decay_steps=320, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=500, global_batch=4, micro_batch=4, recompute="selective", eval_interval=0),
    checkpoint=CheckpointConfig(interval=0, keep_last=1),
)
