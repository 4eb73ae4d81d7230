"""mjax: GPT and BERT training the way Megatron-LM does it, in JAX, with every collective in one readable file."""

__version__ = "0.1.0"
