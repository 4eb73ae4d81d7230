"""Python, packages, flags and driver, with versions and machines that are made up."""

from unittest.mock import Mock

import pynvml
import pytest

from mjax.doctor import GREEN, RED, YELLOW, Facts, host
from mjax.doctor.host import Driver, check_driver, check_jax, check_packages, read_driver
from mjax.utils import packages

H100 = "NVIDIA H100 80GB HBM3"
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * 2**30,) * 8, (0.0,) * 8, on_bus=8)


def pretend(monkeypatch, **versions):
    """Install these packages too, or remove those with version None, and any other plugin for CUDA."""
    installed = {name: version for name, version in packages.installed().items() if not name.startswith("jax-cuda")}
    installed |= {name.replace("_", "-"): version for name, version in versions.items()}
    installed = {name: version for name, version in installed.items() if version is not None}
    monkeypatch.setattr(packages, "installed", lambda: installed)


@pytest.mark.parametrize(("version", "status"), [("3.10.4", RED), ("3.13.0", GREEN), ("3.14.0", YELLOW)])
def test_python_is_one_of_those_tested(monkeypatch, version, status):
    monkeypatch.setattr(host.platform, "python_version", lambda: version)
    finding = host.check_python(Facts())
    assert (finding.status, finding.found.startswith(version)) == (status, True)


def test_installed_packages_fit():
    assert [check(Facts()).status for check in (check_packages, check_jax)] == [GREEN, GREEN]


@pytest.mark.parametrize(
    ("package", "version", "status", "words"),
    [
        ("optax", None, RED, "optax is missing"),
        ("flax", "0.8.1", RED, "flax 0.8.1"),
        ("orbax_checkpoint", "0.13.0", YELLOW, "newer than tested: orbax-checkpoint 0.13.0"),
    ],
)
def test_wrong_version_of_package_is_named(monkeypatch, package, version, status, words):
    pretend(monkeypatch, **{package: version})
    finding = check_packages(Facts())
    assert (finding.status, finding.found.startswith(words)) == (status, True)
    assert finding.advice.startswith(f'pip install "{package.replace("_", "-")}')


JAXLIB = packages.installed()["jaxlib"]


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"jaxlib": "0.4.30"}, RED),
        ({"jaxlib": None}, RED),
        ({"jax_cuda13_plugin": JAXLIB}, RED),
        ({"jax_cuda13_plugin": "0.9.0", "jax_cuda13_pjrt": JAXLIB}, RED),
        ({f"jax_cuda13_{half}": JAXLIB for half in ("plugin", "pjrt")}, GREEN),
        ({f"jax_cuda{major}_{half}": JAXLIB for major in (12, 13) for half in ("plugin", "pjrt")}, YELLOW),
    ],
    ids=["old jaxlib", "no jaxlib", "half a plugin", "old plugin", "one build", "two builds"],
)
def test_jax_and_its_parts_must_fit(monkeypatch, versions, status):
    pretend(monkeypatch, **versions)
    assert check_jax(Facts()).status == status


def test_other_libraries_are_yellow(monkeypatch, tmp_path):
    pretend(monkeypatch, **{f"jax_cuda13_{half}": JAXLIB for half in ("plugin", "pjrt")})
    (tmp_path / "libcudnn.so.9").touch()
    finding = check_jax(Facts(environment={"LD_LIBRARY_PATH": f":{tmp_path}"}))
    assert (finding.status, finding.advice) == (YELLOW, "unset LD_LIBRARY_PATH")
    assert "libcudnn.so.9" in finding.found


# --- The driver -------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make files as Linux shows them for so many NVIDIA GPUs, with this version of the driver, and NVML's answers."""

    def machine(driver=None, gpus=0, **functions):
        monkeypatch.setattr(host, "ROOT", tmp_path)
        if driver:
            file = tmp_path / "proc/driver/nvidia/version"
            file.parent.mkdir(parents=True)
            file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
        nvswitch = (99, "0x068000")  # not a GPU
        for index, kind in [*((gpu, "0x030200") for gpu in range(gpus)), nvswitch]:
            device = tmp_path / f"sys/bus/pci/devices/0000:{index:02}:00.0"
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text(f"{kind}\n")
        answers = {"DeviceGetHandleByIndex": None, "SystemGetDriverVersion": "580.65.06", "DeviceGetName": H100}
        for name, value in {"Init": None, **answers, **functions}.items():
            function = Mock(side_effect=value) if isinstance(value, Exception | list) else Mock(return_value=value)
            monkeypatch.setattr(pynvml, f"nvml{name}", function)
        return read_driver()

    return machine


def judge(monkeypatch, driver, cuda):
    monkeypatch.setattr(host, "read_driver", lambda: driver)
    monkeypatch.setattr(packages, "cuda_build", lambda: cuda)
    return check_driver(Facts())


def test_driver_is_read_from_nvml(machine, monkeypatch):
    memory = [Mock(total=80 * 2**30, used=2**20), Mock(total=80 * 2**30, used=60 * 2**30)]
    driver = machine("580.65.06", 2, DeviceGetCount=2, DeviceGetMemoryInfo=memory)
    assert driver == Driver("580.65.06", (H100,) * 2, (80 * 2**30,) * 2, (2**20, 60 * 2**30), on_bus=2)
    finding = judge(monkeypatch, driver, 13)
    assert finding.status == YELLOW
    assert "60.00 GiB of GPU 1" in finding.found


def test_gpu_that_shares_memory_is_listed(machine):
    error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver = machine("580.65.06", 1, DeviceGetCount=1, DeviceGetMemoryInfo=error)
    assert driver == Driver("580.65.06", (H100,), on_bus=1)


@pytest.mark.parametrize(
    ("error", "gpus", "status", "words"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, 1, RED, "RM has detected an NVML/RM version mismatch."),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 1, RED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 0, YELLOW, "perhaps a login node"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, 1, RED, "1 × NVIDIA GPU, but no driver"),
    ],
)
def test_error_of_nvml_is_reported(machine, monkeypatch, error, gpus, status, words):
    finding = judge(monkeypatch, machine(None, gpus, Init=pynvml.NVMLError(error)), 13)
    assert finding.status == status
    assert words in finding.found


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "words"),
    [
        (Driver(), None, GREEN, "no NVIDIA GPU"),
        (Driver(), 13, YELLOW, "there is no driver"),
        (Driver(on_bus=8), 13, RED, "8 × NVIDIA GPU, but no driver"),
        (EIGHT, None, RED, "jax is the build for CPUs"),
        (Driver("570.86", (H100,)), 13, RED, "CUDA 13 needs driver 580 or newer"),
        (Driver("580.1", (H100,)), 13, GREEN, "580.1"),
        (EIGHT, 13, GREEN, f"driver 580.65.06, 8 × {H100}"),
    ],
)
def test_driver_must_fit_build_of_jax(monkeypatch, driver, cuda, status, words):
    finding = judge(monkeypatch, driver, cuda)
    assert finding.status == status
    assert words in finding.found
    assert (finding.advice is None) == (status == GREEN)
