"""Checkpoints of Megatron-LM, from 2020 to today.

pickles.py      what is in its files, read as data: nothing is executed
names.py        what its tensors are called and how they are laid out and split
ranks.py        format `torch`: a file of each rank, put together again
distributed.py  format `torch_dist`: one folder of parts, whatever the ranks were
arguments.py    the arguments of the run as our `ModelConfig`
checkpoint.py   which checkpoint in a folder, and in which format
command.py      `mjax convert from-megatron`
"""
