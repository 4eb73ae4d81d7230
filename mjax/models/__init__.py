"""Language models written as Flax modules that hold their own shard. This package imports nothing of training."""
