"""Every notebook runs from its first cell to its last, and is committed with its output."""

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

NOTEBOOKS = {file.stem: file for file in sorted((ROOT / "notebooks").glob("*.ipynb"))}
IN_CI = ("01_f_and_g", "07_train_from_python")  # 04 and 08 also fetch 90 and 5 MB
TRAIN = ("04", "05", "07", "08", "10")  # for a minute and more: compiled well rather than quickly
LARGEST = 400_000  # bytes of a notebook, pictures included


def _kernel(folder: Path) -> AsyncKernelManager:
    """A kernel of the interpreter that runs the tests, not installed anywhere."""
    write_kernel_spec(folder / "python3")
    specs = KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    assert manager.kernel_spec.argv[0] == sys.executable
    return manager


def _shown(notebook) -> list[set[str]]:
    """The kinds of output of each code cell: printed text, or the types of displayed data."""

    def kinds(output):
        return set(output.data) if output.output_type in ("display_data", "execute_result") else {output.output_type}

    return [set().union(*map(kinds, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name in IN_CI else pytest.mark.all) for name in NOTEBOOKS]
)
def test_notebook_runs_and_shows_committed_outputs(name, tmp_path):
    committed = nbformat.read(NOTEBOOKS[name], as_version=4)
    nbformat.validate(committed)
    fresh = nbformat.from_dict(committed)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # As in a fresh shell, without the devices that the tests simulate; with their cache of compiled programs.
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "MPLBACKEND")}
    environment["XLA_FLAGS"] = "" if name.startswith(TRAIN) else COMPILE_QUICKLY
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    client = NotebookClient(fresh, km=_kernel(tmp_path), timeout=900, resources=resources)
    client.execute(env=environment, cleanup_kc=True)
    assert _shown(committed) == _shown(fresh)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_whole_small_and_imports_exist(name):
    """Most notebooks run only in `make test-all`; a name that went is seen at once."""
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run all cells, once, in order"
    assert any("image/png" in kinds for kinds in _shown(notebook))
    assert NOTEBOOKS[name].stat().st_size < LARGEST
    for cell in cells:
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "mjax":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    path = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or importlib.util.find_spec(path)
