"""Names of the leaves of a tree, as they appear in messages, in checkpoints and in rules."""

import jax


def leaf_name(path: tuple) -> str:
    """The dotted name of a tree path: 'blocks.mlp.up.kernel'; the slot in which an NNX variable keeps its array is
    left out."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
