"""Every test runs on simulated devices, with compiled programs kept between runs."""

import functools
import gc
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Compilation is the cost of the suite, and what it compares does not depend on how fast the programs run: with these
# flags XLA compiles for CPUs in a fifth of the time. The notebooks run with XLA's defaults.
COMPILE_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib") < "0.11":  # newer ones end the process at a flag that they no longer have
    COMPILE_QUICKLY += " --xla_cpu_use_fusion_emitters=false"

# Before jax is imported: sixteen CPU devices.
os.environ["JAX_PLATFORMS"] = os.environ.get("MJAX_TEST_PLATFORM", "cpu")
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=16"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    # A busy machine may keep a simulated device from a collective for longer than the 40 s after which XLA aborts.
    flags += [COMPILE_QUICKLY, "--xla_cpu_collective_call_terminate_timeout_seconds=200"]
os.environ["XLA_FLAGS"] = " ".join(flags).strip()
# Of what tests start too; nothing goes home.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Tracing makes many small objects and few cycles: Python's default of 700 takes a fifth of the time of a trace.
gc.set_threshold(50_000)

hypothesis.settings.register_profile("patient", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def sigterm_as_before():
    """A run that was told to stop ignores SIGTERM until its process ends; here the process goes on."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def fewer_devices(monkeypatch):
    """A run in this process may leave some of its sixteen devices alone."""
    monkeypatch.setattr("mjax.training.loop.check_devices", lambda *_: None)


@pytest.fixture(scope="module")
def quick_runs():
    """Runs of a module share the programs of equal configs, which would be traced again, and draw no curves."""
    from mjax.training import loop
    from mjax.training.metrics import MetricsLog

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_program", functools.cache(loop.build_program))
        patch.setattr(MetricsLog, "draw", lambda *_, **__: None)
        yield


def pytest_sessionfinish():
    """Pytest and Python collect garbage several times as they end, seconds each after so many traces."""
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--parity", action="store_true", help="run the comparisons with torch, transformers and megatron-core"
    )
    parser.addoption("--long", action="store_true", help="run what takes minutes besides: make test-parity does")
    parser.addoption("--product", action="store_true", help="run products of options whole: make test-products")


def pytest_ignore_collect(collection_path, config):
    """Without --parity torch and transformers are not even imported, unless a file of their tests is named."""
    if collection_path != ROOT / "tests" / "parity" or config.getoption("--parity"):
        return None
    named = any("parity" in Path(argument.partition("::")[0]).parts for argument in config.args)
    return None if named else True


# Files that take longest, the notebooks ten minutes, start first, so that no worker waits for the last file of another.
LONGEST = ("test_notebooks.py", "test_llama_transformers.py", "test_mixture_transformers.py", "test_processes.py")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        if item.get_closest_marker("parity") and not config.getoption("--parity"):
            item.add_marker(pytest.mark.skip(reason="compares with another library: make test-parity"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-parity, or pytest --long"))
        if item.get_closest_marker("product") and not config.getoption("--product"):
            item.add_marker(pytest.mark.skip(reason="left to make test-products"))
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
