"""Reads the collectives of a traced program: which, over what axis, how often a step, and inside which loops."""

from dataclasses import dataclass

from mjax.parallel.mesh import abstract_mesh
from mjax.training.step import build_program

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    count: int  # times a step
    loops: tuple[int, ...]  # trip counts of the scans around it

    @property
    def bytes(self):
        size = 1
        for dim in self.shape:
            size *= dim
        return size * {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4}[self.dtype]


def traced_step(config):
    """The program of `config` for a mesh that nobody has to own, and the jaxpr of its training step."""
    program = build_program(config, abstract_mesh(config.mesh))
    return program, program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr


def collectives(jaxpr, count=1, loops=()) -> list[Collective]:
    found = []
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name in KINDS:
            axes = parameters.get("axes", parameters.get("axis_name"))
            axes = axes if isinstance(axes, tuple) else (axes,)
            for operand in equation.invars:
                found.append(Collective(KINDS[name], axes, operand.aval.shape, str(operand.aval.dtype), count, loops))
        times, inner = (
            (count * parameters["length"], (*loops, parameters["length"])) if name == "scan" else (count, loops)
        )
        for value in parameters.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    found += collectives(item, times, inner)
    return found


def equations(jaxpr, name):
    """Every equation of the primitive `name`, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    yield from equations(item, name)
