"""Names of the leaves of a tree, for messages, checkpoints and rules."""

import jax


def leaf_name(path: tuple) -> str:
    """The dotted name of a tree path: 'blocks.mlp.up.kernel', without the slot in which an NNX variable keeps its
    array."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
