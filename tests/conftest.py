"""Every test runs on simulated devices, with compiled programs kept between runs."""

import contextlib
import functools
import gc
import os
import signal
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mjax.cluster.launch import IN_ORDER, THREADS, THREADS_PER_DEVICE  # noqa: E402  imports no JAX

# Compilation is the cost of the suite, and what it compares does not depend on how fast the programs run: with these
# flags XLA compiles for CPUs in a fifth of the time. The notebooks run with XLA's defaults.
COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib") < "0.11":  # newer ones end the process at a flag that they no longer have
    COMPILE_QUICKLY += " --xla_cpu_use_fusion_emitters=false"

# Before jax is imported: sixteen CPU devices.
os.environ["JAX_PLATFORMS"] = os.environ.get("MJAX_TEST_PLATFORM", "cpu")
# One instruction set: every x86_64 machine rounds the sums of a program in the same way.
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=16", "--xla_cpu_max_isa=AVX2"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    # A busy machine may keep a simulated device from a collective for longer than the 40 s after which XLA aborts.
    flags += [COMPILE_QUICKLY, IN_ORDER, "--xla_cpu_collective_call_terminate_timeout_seconds=200"]
os.environ["XLA_FLAGS"] = " ".join(flags).strip()
os.environ.setdefault(THREADS, str(THREADS_PER_DEVICE * 16))
# Also for processes that tests start. Clones on one machine share a cache: each compiles only its new programs.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mjax-tests"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.shapes import install as install_shape_checks  # noqa: E402

# The shapes and dtypes of signatures are checked at every call, with dims of one name equal within it.
install_shape_checks()

from mjax.utils.packages import cuda_build  # noqa: E402

# Tracing makes many small objects and few cycles: Python's default of 700 takes a fifth of the time of a trace.
gc.set_threshold(50_000)

hypothesis.settings.register_profile("patient", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def signals_as_before():
    """A stopping run ignores signals until its process ends; here the process continues."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def freeze_garbage():
    """Exempt the objects of a finished module from garbage collection, which would take a twentieth of the time."""
    yield
    gc.freeze()


@pytest.fixture
def fewer_devices(monkeypatch):
    """A run in this process may leave some of its sixteen devices alone."""
    monkeypatch.setattr("mjax.run.loop.check_devices", lambda *_: None)


@pytest.fixture(scope="module")
def quick_runs():
    """Runs of a module share the programs of equal configs, which would be traced again, and draw no curves."""
    from mjax.run import loop
    from mjax.run.metrics import MetricsLog

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_program", functools.cache(loop.build_program))
        patch.setattr(MetricsLog, "draw", lambda *_, **__: None)
        yield


# --- Tiers ------------------------------------------------------------------------------------------------------------

TIERS = ("check", "test", "ci", "all")
"""Each has the tests of those before it: `make check`, `make test`, `.ci/run`, `make test-all`."""

SECONDS = ROOT / "tests" / "seconds.txt"


def measured_seconds() -> dict[str, float]:
    """Processor time of the test functions that take 0.1 s or more, by `file::function`; `--measure` writes it."""
    rows = (line.split() for line in SECONDS.read_text().splitlines() if not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def function_of(item) -> str:
    return f"{item.path.relative_to(ROOT)}::{item.originalname}"


def tier_of(item, slow) -> str:
    """The first tier that runs a test: its mark's; otherwise `test` if it takes 0.1 s, and `check` if not."""
    tiers = [tier for tier in ("ci", "all") if item.get_closest_marker(tier)]
    if item.get_closest_marker("parity"):
        tiers.append("ci")
    if function_of(item) in slow:
        tiers.append("test")
    return max(tiers, key=TIERS.index, default="check")


def pytest_addoption(parser):
    parser.addoption("--tier", choices=TIERS, default="test", help="run the tests of this tier, and of those before it")
    parser.addoption("--beyond", choices=TIERS, help="leave out the tests of this tier, and of those before it")
    parser.addoption("--measure", action="store_true", help="write tests/seconds.txt: which tests take 0.1 s or more")


def pytest_configure(config):
    """Refuse to measure in workers, whose seconds would be lost."""
    if config.getoption("--measure") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--measure needs one process; type pytest --measure -n0")


def pytest_ignore_collect(collection_path, config):
    """Below the tier `ci` torch and transformers are not even imported, unless a file of their tests is named."""
    if collection_path != ROOT / "tests" / "parity" or config.getoption("--tier") in ("ci", "all"):
        return None
    named = any("parity" in Path(argument.partition("::")[0]).parts for argument in config.args)
    return None if named else True


def pytest_collection_modifyitems(config, items):
    """Select the tier, and start the longest files first, so that no worker waits for the last file of another."""
    slow, tier, beyond = measured_seconds(), config.getoption("--tier"), config.getoption("--beyond")
    first = TIERS.index(beyond) + 1 if beyond else 0
    wanted = TIERS[first : TIERS.index(tier) + 1]
    selected, others = [], []
    for item in items:
        (selected if tier_of(item, slow) in wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    of_file = Counter()
    for function in sorted({function_of(item) for item in selected}):  # every worker adds up in one order
        of_file[ROOT / function.partition("::")[0]] += slow.get(function, 0)
    items[:] = sorted(selected, key=lambda item: -of_file[item.path])
    for item in items:
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("compiler") and cuda_build() is None:
            item.add_marker(pytest.mark.skip(reason="needs JAX's CUDA wheels: make test-compiler"))


_seconds: Counter = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begun = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        _seconds[function_of(item)] += sum(os.times()[:4]) - begun


def pytest_sessionstart(session):
    """Forget programs that were compiled more than a week ago."""
    if not hasattr(session.config, "workerinput"):
        for file in CACHE.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another session may do the same
                if file.stat().st_mtime < time.time() - 7 * 86400:
                    file.unlink()


def pytest_sessionfinish(session):
    """Pytest and Python collect garbage several times as they end, seconds each after so many traces."""
    gc.freeze()
    if session.config.getoption("--measure") and not hasattr(session.config, "workerinput"):
        known = measured_seconds() | _seconds  # of this run, and of tests that it did not select
        rows = [f"{seconds:.1f} {name}" for name, seconds in sorted(known.items()) if seconds >= 0.1]
        SECONDS.write_text("\n".join(["# Written by `pytest --measure`: processor seconds, test function.", *rows, ""]))
