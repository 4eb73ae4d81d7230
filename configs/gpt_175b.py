"""GPT-3 175B as Megatron trains it on 1,024 GPUs, with a batch ramp-up from 16 to 1,536.

parameters   174,615,846,912 with the vocabulary padded to 51,200
hardware     1,024 GPUs, pipe 16 × data 8 × model 8; a global batch of 1,536 is 192 micro-batches of 1 on each replica;
             6 layers per stage
to beat      140 TFLOP/s per GPU, including recomputation, 45% of the peak of an A100: 34 days for 300B tokens; 105.1
             model TFLOP/s, as mjax counts them
source       arXiv 2104.04473 (estimate of training times); mesh, batches and training from Megatron's
             pretrain_gpt3_175B.sh (fp16: add --precision.compute fp16), which follows arXiv 2005.14165, table 2.1 and
             appendix B
training     in samples of 2,048 tokens: 146,484,375 in all (300B tokens), batch ramp-up over 5,859,375 (12B), warm-up
             over 183,105 (375M), cosine to a tenth over 126,953,125 (260B); the steps below are equivalent. Each of the
             96 batch sizes is compiled once, in the first 12B tokens
"""

from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig

config = Config(
    model=GPTConfig(layers=96, hidden=12288, heads=96, sequence=2048, init_std=0.006),
    mesh=MeshConfig(pipe=16, data=8, model=8, sequence_parallel=True),
    optimizer=OptimizerConfig(
        learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=7_028, decay_steps=98_640, weight_decay=0.1, beta2=0.95
    ),
    train=TrainConfig(
        steps=111_355,
        global_batch=1536,
        batch_rampup=(16, 16, 5_859_375),
        micro_batch=1,
        recompute="full",
        eval_batches=40,
    ),
    checkpoint=CheckpointConfig(interval=1_000, keep_last=2, keep_every=10_000),
)
