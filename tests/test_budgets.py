"""Budgets of the house: its size, the time of a test, and the way from `train.py` to the loss and to attention."""

import ast
import inspect
import sys
import tomllib
import traceback
from pathlib import Path

import pytest

from mjax.models import causal
from mjax.parallel import linear
from mjax.run import loop
from scripts.check_words import WORDS
from scripts.make_numbers import NUMBERS
from tests.small import small_config
from tests.test_docs import PAGES, code_lines
from tests.test_train_command import run_here
from tests.traced import traced_step

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("fewer_devices")


def test_no_test_waits_without_end(pytestconfig):
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0


def test_a_batch_is_followed_in_few_frames(tmp_path, monkeypatch):
    """Frames of mjax while the train step is traced, with one micro-batch; JAX's frames are left out."""
    seen = {}

    def noted(module, name):
        function = getattr(module, name)

        def spy(*arguments):
            stack = [frame for frame in traceback.extract_stack()[:-1] if frame.filename.startswith(f"{ROOT}/mjax/")]
            if any(frame.name == "_train_step" for frame in stack):
                seen.setdefault(name, stack)
            return function(*arguments)

        monkeypatch.setattr(module, name, spy)

    noted(linear, "_matmul")
    noted(causal, "vocab_parallel_cross_entropy")
    run_here(tmp_path, "--train.steps", "1", "--train.micro-batch", "8", "--train.global-batch", "8")
    to_loss, to_product = seen["vocab_parallel_cross_entropy"], seen["_matmul"]
    of_step = to_product[[frame.name for frame in to_product].index("_train_step") :]
    shown = "\n".join(f"{Path(frame.filename).relative_to(ROOT)} {frame.name}" for frame in to_loss + of_step)
    print(shown)
    page = [
        tuple(line.split()[:2])
        for line in PAGES["docs/extend/code-walkthrough.md"].splitlines()
        if line.startswith("mjax/")
    ]
    stack = [(str(Path(frame.filename).relative_to(ROOT)), frame.name) for frame in to_loss + of_step]
    assert page == list(dict.fromkeys(stack)), shown
    assert len(to_loss) <= 12, shown
    assert len({frame.filename for frame in to_loss}) + 1 <= 7, shown  # and train.py
    assert len(of_step) <= 12, shown
    assert [frame for frame in of_step if (Path(frame.filename).name, frame.name) == ("attention.py", "__call__")], (
        shown
    )


def test_every_module_is_in_a_room():
    assert {file.name for file in (ROOT / "mjax").glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_the_house_does_not_grow():
    """New code is paid for by removed code: these limits only fall, towards 25,000 lines in 190 files.

    Exceptions: of the 91 lines of hidden_states, attention_weights, log_probs and gradients, 36 were paid for; of the
    869 of the door to Megatron-LM (its export, its optimizer both ways, HybridModel, Megatron-Bridge), 24; of the 2,000
    of DeepSeek's family, GLM-4.5, experts in rounds, stages that differ, the parametrizations, check-scaling and scale,
    540.
    """
    files = list((ROOT / "mjax").rglob("*.py"))
    lines = sum(map(code_lines, files))
    assert lines <= 29_200
    shown = tomllib.loads(NUMBERS.read_text())["package_lines"]["text"]
    assert lines == pytest.approx(int(shown.replace(",", "")), abs=50)
    assert len(files) <= 199


def test_words_for_a_term_are_few():
    """Lines of the package with an everyday word: this limit only falls."""
    lines = [line for file in (ROOT / "mjax").rglob("*.py") for line in file.read_text().splitlines()]
    assert sum(bool(WORDS.search(line)) for line in lines) <= 12


def test_no_function_is_complex():
    """Ways through a function: 20 is the end of radon's rank C."""
    branches = (ast.If, ast.For, ast.While, ast.IfExp, ast.Assert, ast.ExceptHandler, ast.match_case, ast.Lambda)
    complex_ones = {}
    for file in (ROOT / "mjax").rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                ways = 1 + sum(isinstance(node, branches) for node in nodes)
                ways += sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
                ways += sum(1 + len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
                if ways > 20:
                    complex_ones[f"{file.relative_to(ROOT)} {function.name}"] = ways
    assert not complex_ones


def test_order_of_xla_is_set_in_one_file():
    """And few backward passes are written out, each for a reason that autodiff cannot have."""
    texts = {file.relative_to(ROOT / "mjax").as_posix(): file.read_text() for file in (ROOT / "mjax").rglob("*.py")}
    assert [name for name, text in texts.items() if "lax.optimization_barrier" in text] == ["parallel/autodiff.py"]
    written = {name: count for name, text in texts.items() if (count := text.count("jax.custom_vjp"))}
    assert sum(written.values()) <= 8, written
    assert len(written) <= 5, written


def test_the_loop_fits_on_a_screen():
    """And what happens around the steps stands in callbacks."""
    for function in (loop.Run.take_steps, loop.Run._take_steps):
        assert len(inspect.getsource(function).splitlines()) <= 36
    assert sum(map(code_lines, (ROOT / "mjax" / "run").glob("*.py"))) <= 1_920


def test_pages_count_the_lines_of_the_core():
    """Lines of `parallel/`, `models/` without the folders of architectures, and the train step; and of these the
    files that the step of a GPT runs through while it is traced, with `models/gpt/model.py`."""
    mjax = ROOT / "mjax"
    step = mjax / "step" / "step.py"
    core = {step, *(file for room in ("parallel", "models", "models/parts") for file in (mjax / room).glob("*.py"))}
    core -= {mjax / "models" / "parts" / "config.py"}
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        traced_step(small_config(data=2, model=2))
    finally:
        sys.setprofile(None)
    of_gpt = {file for file in core | {mjax / "models" / "gpt" / "model.py"} if str(file) in called}
    assert step in of_gpt
    counted = [sum(map(code_lines, files)) for files in (core, of_gpt)]
    print("lines of the core {:,}, of a dense GPT {:,}".format(*counted))
    numbers = tomllib.loads(NUMBERS.read_text())
    for name, count in zip(("core_lines", "dense_lines"), counted, strict=True):
        assert count == pytest.approx(int(numbers[name]["text"].replace(",", "")), abs=20)
    # 3,140 before the experts in rounds (30), stages that differ (60), and the order of collectives on CPUs (35)
    assert counted[0] <= 3_215
    assert counted[1] <= 1_825
