"""Language models as Flax modules, which compute with this device's shards. They import nothing of training."""

import mjax.config  # noqa: F401  registers the folders of architectures before one of them is imported by itself
