"""Laws of what may communicate, and of what may import what."""

import ast
import collections
import graphlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.small import small_config
from tests.traced import traced_step

COLLECTIVES = (
    "psum|psum_scatter|all_gather|all_gather_invariant|all_to_all|ragged_all_to_all|ppermute|pshuffle|pbroadcast|"
    "pmean|pmax|pmin|pcast|pvary|axis_index|axis_size"
)


def test_only_mappings_names_collectives_of_jax():
    pattern = re.compile(rf"\blax\.({COLLECTIVES})\b|from jax\.lax import")
    files = {*(ROOT / "mjax").rglob("*.py"), ROOT / "train.py"}
    found = {file for file in files if pattern.search(file.read_text())}
    assert found == {ROOT / "mjax" / "parallel" / "mappings.py"}


PACKAGES_BELOW = {
    "utils": "",
    "config": "utils",
    "parallel": "config utils",
    "cluster": "config utils",
    "lora": "config parallel",
    "models": "config lora parallel utils",
    "data": "config utils",
    "pictures": "cluster config parallel utils",
    "step": "config models parallel utils",
    "planner": "cluster config models parallel pictures step utils",
    "checkpoint": "cluster config models parallel step utils",
    "run": "checkpoint cluster config data models parallel pictures planner step utils",
    "generation": "checkpoint config data models parallel run step utils",
    "interop": "checkpoint config data lora models parallel step utils",
    "profiling": "cluster parallel planner run utils",
    "tasks": "checkpoint config data generation models parallel pictures run step utils",
    "finetuning": "checkpoint cluster config data models parallel pictures run step tasks utils",
    "doctor": "checkpoint cluster config models parallel utils",
    "commands": "checkpoint cluster config data doctor finetuning generation interop models parallel pictures planner "
    "profiling run step tasks utils",
}
"""What a room of mjax may import from, besides itself and `errors`."""


@cache
def imports(types=True):
    """(file, imported file) of every import in mjax, also of those inside functions, and with `types` of those that
    only a type checker reads; paths relative to mjax/."""
    modules = {file.relative_to(ROOT).with_suffix("").parts: file for file in (ROOT / "mjax").rglob("*.py")}
    modules |= {parts[:-1]: file for parts, file in modules.items() if parts[-1] == "__init__"}
    pairs = set()
    for file in set(modules.values()):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
                node.body = [ast.Pass()]
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [tuple(alias.name.split(".")) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: a relative import"
                names = [(*node.module.split("."), alias.name) for alias in node.names]
            for name in names:
                found = modules.get(name) or modules.get(name[:-1])
                assert found or name[0] != "mjax", f"{file} imports {'.'.join(name)}, which is not there"
                if found and found != ROOT / "mjax" / "__init__.py":
                    pairs.add((file.relative_to(ROOT / "mjax"), found.relative_to(ROOT / "mjax")))
    return pairs


def test_imports_run_downward():
    packages = {file.parts[0] for file, _ in imports() if len(file.parts) > 1}
    assert packages == set(PACKAGES_BELOW)
    for file, imported in imports():
        importer, package = file.parts[0], imported.parts[0]
        if len(file.parts) > 1 and len(imported.parts) > 1:
            assert package in {importer, *PACKAGES_BELOW[importer].split()}, f"{file} imports {imported}"
        elif len(file.parts) > 1:
            assert imported.name in ("errors.py", "__init__.py"), f"{file} imports {imported}"


def test_no_file_outside_imports_an_architecture():
    """Except fine-tuning, which replaces the head of a BERT."""
    folders = {file.parent.name for file in (ROOT / "mjax" / "models").glob("*/model.py")}
    of_architecture = lambda file: file.parts[0] == "models" and file.parts[1] in folders  # noqa: E731
    importers = {file for file, imported in imports() if of_architecture(imported) and not of_architecture(file)}
    assert importers == {Path("finetuning/tuning.py")}


def test_no_imports_run_in_circle():
    graph = collections.defaultdict(set)
    for file, imported in imports(types=False):
        graph[file].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(map(str, error.args[1])))


def test_sequence_parallelism_has_no_effect_without_model_ranks():
    plain = small_config(2, 1, 4, recompute="selective", unroll="off")
    asked = replace(plain, mesh=replace(plain.mesh, sequence_parallel=True))
    programs = [re.sub(r" at 0x\w+", "", str(traced_step(config)[1])) for config in (plain, asked)]
    assert programs[0] == programs[1]
