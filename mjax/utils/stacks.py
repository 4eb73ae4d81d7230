"""Names of the weights of stacked layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
