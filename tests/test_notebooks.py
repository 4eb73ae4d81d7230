"""Every notebook runs from its first cell to its last, and is committed with what its cells show."""

import ast
import importlib.util
import os
import sys
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from tests.conftest import COMPILE_QUICKLY, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Compile, search or train for half a minute and more; 04 fetches 90 MB, 08 5 MB.
LONG = (
    "02_pipeline", "03_data", "04_from_and_to_hugging_face", "05_bert_depth", "06_before_the_run",
    "07_train_from_python", "08_from_gpt2_to_llama", "09_mixture_of_experts",
)  # fmt: skip
TRAIN = ("04", "05", "07", "08")  # for a minute and more: compiled well rather than quickly
# Notebook 08 trains six models for two minutes each. Only `make test-products` does that; elsewhere they take a few
# steps, and what the notebook says of their losses is not judged.
SHORTER = {
    "steps=100, global_batch=16, eval_interval=100": "steps=6, global_batch=8, eval_interval=6, eval_batches=1",
    "warmup_steps=20": "warmup_steps=2",
}
JUDGED = 'assert after < before - 0.1, "rotary positions are the step that a small model feels"'
LARGEST = 400_000  # bytes of a notebook, pictures included


def _kernel(folder: Path) -> AsyncKernelManager:
    """A kernel of the interpreter that runs the tests, known to nobody else."""
    write_kernel_spec(folder / "python3")
    specs = KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    assert manager.kernel_spec.argv[0] == sys.executable
    return manager


def _environment(trains: bool) -> dict[str, str]:
    """As in a fresh shell, without the devices that the tests simulate; with their cache of compiled programs."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "MPLBACKEND")
    }
    return kept | {"XLA_FLAGS": "" if trains else COMPILE_QUICKLY}


def _shown(notebook) -> list[set[str]]:
    """The kinds of output of each code cell: text that is printed, or the types of what is displayed."""

    def kinds(output):
        return set(output.data) if output.output_type in ("display_data", "execute_result") else {output.output_type}

    return [set().union(*map(kinds, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def _shorter(source: str) -> str:
    for given, instead in {**SHORTER, JUDGED: ""}.items():
        source = source.replace(given, instead)
    return source


def _marks_of(name: str):
    if name.startswith("08"):
        return pytest.mark.all
    return pytest.mark.ci if name in LONG else ()


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize(
    ("file", "whole"),
    [
        *(pytest.param(file, True, id=file.stem, marks=_marks_of(file.stem)) for file in NOTEBOOKS),
        pytest.param(
            next(file for file in NOTEBOOKS if file.stem.startswith("08")),
            False,
            id="08, a few steps",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_a_notebook_runs_and_shows_what_is_committed(file, whole, tmp_path):
    committed = nbformat.read(file, as_version=4)
    nbformat.validate(committed)
    fresh = nbformat.from_dict(committed)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.source = cell.source if whole else _shorter(cell.source)
    if not whole:
        assert all(text in str(committed) and text not in str(fresh) for text in SHORTER)
    client = NotebookClient(
        fresh, km=_kernel(tmp_path), timeout=900, resources={"metadata": {"path": str(file.parent)}}
    )
    client.execute(env=_environment(whole and file.stem.startswith(TRAIN)), cleanup_kc=True)
    assert _shown(committed) == _shown(fresh)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_what_a_notebook_imports_from_mjax_is_there(file):
    """Most notebooks run only with the long tests; a name that went is seen at once."""
    cells = [cell.source for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    statements = [
        node
        for cell in cells
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell)))
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "mjax"
    ]
    for statement in statements:
        module = importlib.import_module(statement.module)
        for name in statement.names:
            assert hasattr(module, name.name) or importlib.util.find_spec(f"{statement.module}.{name.name}")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_committed_whole_and_small(file):
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run all cells, once, in order"
    assert any("image/png" in kinds for kinds in _shown(nbformat.read(file, as_version=4)))
    assert file.stat().st_size < LARGEST
