"""Checkpoints of Megatron-LM, from 2020 to today.

pickles.py      reads its files as data: nothing is executed
names.py        names, layouts and tensor-parallel splits of its tensors
ranks.py        format `torch`: one file per rank, merged
distributed.py  format `torch_dist`: one folder of parts, independent of the number of ranks
arguments.py    the arguments of the run as our `ModelConfig`
decoder.py      models like Llama: arguments, and fused tensors cut into those of Hugging Face
experts.py      mixtures of experts: their arguments, and the experts of several ranks
checkpoint.py   finds the checkpoint in a folder, and its format
"""
