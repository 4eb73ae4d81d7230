"""No collective of a compiled step can start while a loop that contains one of its kind and ranks still runs.

XLA for CPUs gives all collectives one channel, and orders a collective after a loop by when the loop *starts*, unless
the loop's result goes into it (openxla/xla, xla/runtime/execution_graph.cc, kScheduling).
"""

import re
from dataclasses import replace

import pytest

from mjax.config import MeshConfig
from mjax.parallel.mesh import make_mesh
from mjax.step.step import build_program
from tests.models.test_mixture import MIXTURE
from tests.models.test_token_dispatcher import NODES
from tests.small import small_config
from tests.training.test_deepseek_meshes import MODEL

COLLECTIVES = r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
LOOPS = ("while", "conditional", "call")
CALLED = r"(?:body|condition|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations=\{([^}]*)\}"


def unordered(text):
    """(loop, collective) pairs; the loop has a collective of this kind and these ranks, and the other one is later in
    the schedule and does not depend on the loop."""
    computations, steps = {}, []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            steps = computations[head[1]] = []
        elif step := re.match(r"\s+(?:ROOT )?%([\w.-]+) = .*?[ )\]}]([a-z][a-z0-9-]*)\((.*)", line):
            name, operation, rest = step.groups()
            rest = rest.partition(", metadata=")[0]
            called = [each for pair in re.findall(CALLED, rest) for each in re.findall(r"[\w.-]+", " ".join(pair))]
            steps.append((name, operation, rest, set(re.findall(r"%([\w.-]+)", rest)), called))

    def collectives(operation, rest, called):
        """Kinds and groups of devices."""
        if operation in LOOPS:
            inner = (collectives(op, rest, calls) for body in called for _, op, rest, _, calls in computations[body])
            return frozenset().union(*inner)
        groups = re.search(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\S+)", rest)
        return frozenset({(operation, groups and groups[1])}) if re.fullmatch(COLLECTIVES, operation) else frozenset()

    for steps in computations.values():
        for index, (loop, operation, rest, _, called) in enumerate(steps):
            if operation in LOOPS and (inside := collectives(operation, rest, called)):
                after = {loop}
                for name, op, rest, operands, inner in steps[index + 1 :]:
                    if operands & after:
                        after.add(name)
                    elif inside & collectives(op, rest, inner):
                        yield loop, name


LATENT = {**MODEL, "sequence": 16, "micro_batch": 4}  # one micro-batch: no loop around the layers' loops
ROUNDS = {**MIXTURE, "experts": 8, "sequence": 16, "moe_token_dispatcher": "alltoall"}


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"data": 4, "zero": 3}, {}),
        ({"data": 2, "model": 2, "zero": 3, "sequence_parallel": True}, {}),
        ({"data": 4}, {}),
        ({"data": 2, "model": 2, "zero": 3}, LATENT),
        ({"data": 2, "context": 2, "zero": 3}, LATENT),
        ({"data": 2, "pipe": 2, "zero": 3}, LATENT),
        ({"data": 4, "expert": 2, "zero": 3}, ROUNDS),
        ({"data": 2, "expert": 2, "model": 2, "sequence_parallel": True}, ROUNDS | {"shared_expert_ffn_hidden": 16}),
        ({"data": 4, "expert": 4, "model": 2, "sequence_parallel": True}, ROUNDS | NODES),
    ],
    ids=str,
)
def test_collectives_wait_for_loops_before_them(axes, changes):
    config = replace(small_config(**{"micro_batch": 2, "layers": 4, **changes}), mesh=MeshConfig(**axes))
    program = build_program(config, make_mesh(config.mesh))
    step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    assert re.search(r" while\(", step)
    assert not list(unordered(step))
    evaluation = program.eval_step.lower(program.abstract_state.model, program.abstract_batch).compile().as_text()
    assert not list(unordered(evaluation))
