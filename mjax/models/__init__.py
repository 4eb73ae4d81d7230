"""Language models written as Flax modules that hold their own shard. This package imports nothing of training."""

import mjax.config  # noqa: F401  registers the folders of architectures before one of them is imported by itself
