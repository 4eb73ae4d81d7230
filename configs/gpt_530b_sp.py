"""GPT 529.6B on 35 servers, with sequence parallelism and selective recomputation.

parameters   529,600,819,200 with the vocabulary padded to 51,200
hardware     280 GPUs, pipe 35 × data 1 × model 8; a global batch of 280 is 280 micro-batches of 1; 1 layer in each of 3
             virtual stages per device
to beat      37.83 s per step on A100s, 56.0% MFU: 175 model TFLOP/s per GPU
source       arXiv 2205.05198, tables 3 and 5, third row (fp16 on A100s: add --precision.compute fp16)
training     500 steps to measure speed, as in Megatron's scripts for such runs (sc21/CONFIG.sh); the paper gives no
             learning rate; this is GPT-3 175B's, the nearest (arXiv 2005.14165, table 2.1). To train, raise
             --mesh.data and --train.global-batch together, and take steps, warm-up and decay from gpt_530b
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=105, hidden=20480, heads=128, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=35, data=1, model=8, virtual_stages=3, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=3, decay_steps=320, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(steps=500, global_batch=280, micro_batch=1, recompute="selective", eval_interval=0),
    checkpoint=CheckpointConfig(interval=0, keep_last=1),
)
