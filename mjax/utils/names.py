"""Names of the leaves of a tree, for messages, checkpoints and rules."""

import re
from collections.abc import Mapping

import jax


def leaf_name(path: tuple) -> str:
    """The dotted name of a tree path: 'blocks.mlp.up.kernel', without the slot in which an NNX variable keeps its
    array."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


# --- Weights of stacked layers ----------------------------------------------------------------------------------------


STACK = re.compile(r"^blocks\.(?:(\d+)\.)?(?:turns\.(\d+)\.)?")
"""What the name of a stacked weight begins with: the number of its stack, and of its turn (`models/block.py`)."""


def name_in_layer(name: str) -> str:
    """The name of a stacked weight as in a model with equal layers: 'blocks.1.mlp.up' → 'blocks.mlp.up'."""
    return STACK.sub("blocks.", name)


def stack_and_turn(name: str) -> tuple[int, int]:
    """The numbers of the stack and of the turn of a stacked weight: 'blocks.1.mlp.up' → (1, 0)."""
    stack, turn = (int(number or 0) for number in STACK.match(name).groups())
    return stack, turn


def numbers_of_layers(depths: Mapping[str, int]) -> dict[str, range]:
    """The layers of the model, from 1, whose weights are stacked in each array, from the number of layers in it."""
    turns, of_stack = {}, {}
    for name, layers in depths.items():
        stack, turn = stack_and_turn(name)
        turns[stack] = max(turns.get(stack, 1), turn + 1)
        of_stack[stack] = layers
    first = {stack: 1 + sum(of_stack[other] * turns[other] for other in of_stack if other < stack) for stack in turns}
    numbers = {}
    for name, layers in depths.items():
        stack, turn = stack_and_turn(name)
        start, step = first[stack] + turn, turns[stack]
        numbers[name] = range(start, start + layers * step, step)
    return numbers
