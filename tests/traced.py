"""The traced training step, and what is in it."""

from pathlib import Path

import mjax
from mjax.parallel.mesh import abstract_mesh
from mjax.planner.program import inner_jaxprs
from mjax.step.step import build_program

MJAX = str(Path(mjax.__file__).parent)


def traced_step(config):
    """The program of `config` for a mesh that need not exist, and the jaxpr of its training step."""
    program = build_program(config, abstract_mesh(config.mesh))
    return program, program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr


def count_in_program(ledger):
    """Calls and bytes as in the text of a program, with every branch, by (axes, operation, dtype)."""
    return {
        key: (sum(r.calls for r in group.records), sum(r.calls * r.operand_bytes for r in group.records))
        for key, group in ledger.group_by("axes", "operation", "dtype").items()
    }


def equations(jaxpr, name=None):
    """Every equation, or every one of the primitive `name`, at any depth."""
    for equation in jaxpr.eqns:
        if name in (None, equation.primitive.name):
            yield equation
        for body in inner_jaxprs(equation):
            yield from equations(body, name)


def writer(equation):
    """The innermost function of mjax on the stack when an operation was traced, but for those that take functions."""
    for frame in equation.source_info.traceback.frames:
        if frame.file_name.startswith(MJAX) and not frame.file_name.endswith("/parallel/autodiff.py"):
            return frame.function_name.partition(".<locals>.<")[0].replace("<locals>.", "")
    return "?"


def scopes(jaxpr):
    """A jaxpr and those in it, at any depth."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for body in inner_jaxprs(equation):
            yield from scopes(body)


def carried(loop):
    """Shapes and types of a scan's carry; its other results have one dim more than its body's."""
    body = getattr(loop.params["jaxpr"], "jaxpr", loop.params["jaxpr"])
    results = zip(loop.outvars, body.outvars, strict=True)
    return [result.aval for result, inner in results if result.aval.shape == inner.aval.shape]
