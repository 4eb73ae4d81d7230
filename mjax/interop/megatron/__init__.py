"""Checkpoints of Megatron-LM, from 2020 to today. `torch_files.py` reads their files as data: nothing is executed.

checkpoint.py  finds the checkpoint in a folder, and its format
tensors.py     the tensors of formats `torch` and `torch_dist`, merged, and those of decoders as in Hugging Face
names.py       names, layouts and tensor-parallel splits of the tensors
arguments.py   the arguments of the run as our `ModelConfig`
"""
