"""The driver and what hides GPUs, on machines that are made up."""

import json
import subprocess
import sys
from unittest.mock import Mock

import pynvml
import pytest

from mjax.doctor import GREEN, RED, YELLOW
from mjax.doctor.driver import Driver, ask_nvml, check_driver, check_visible, read_driver

H100 = "NVIDIA H100 80GB HBM3"
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * 2**30,) * 8, (0.0,) * 8, on_bus=8)


def machine(folder, driver=None, gpus=0):
    """Files as Linux shows them for so many NVIDIA GPUs, with this version of the driver loaded."""
    if driver:
        file = folder / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
    nvswitch = (99, "0x068000")  # not a GPU
    for index, kind in [*((gpu, "0x030200") for gpu in range(gpus)), nvswitch]:
        device = folder / f"sys/bus/pci/devices/0000:{index:02}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(f"{kind}\n")
    return folder


def nvml(monkeypatch, **functions):
    """NVML's library, made up."""
    names = {"Init": None, "DeviceGetHandleByIndex": None, "SystemGetDriverVersion": "580.65.06", "DeviceGetName": H100}
    for name, value in {**names, **functions}.items():
        function = Mock(side_effect=value) if isinstance(value, Exception | list) else Mock(return_value=value)
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    try:
        return sys.executable, "-c", f"print({json.dumps(ask_nvml())!r})"
    except pynvml.NVMLError as error:
        return sys.executable, "-c", f"import pynvml; raise pynvml.NVMLError({error.value})"


def test_driver_is_read_from_nvml(tmp_path, monkeypatch):
    memory = [Mock(total=80 * 2**30, used=2**20), Mock(total=80 * 2**30, used=60 * 2**30)]
    ask = nvml(monkeypatch, DeviceGetCount=2, DeviceGetMemoryInfo=memory)
    driver = read_driver(machine(tmp_path, "580.65.06", 2), ask)
    assert driver == Driver("580.65.06", (H100,) * 2, (80 * 2**30,) * 2, (2**20, 60 * 2**30), on_bus=2)
    (finding,) = check_driver(driver, 13)
    assert finding.status == YELLOW
    assert "60.0 GiB of GPU 1" in finding.found


@pytest.mark.parametrize(
    ("error", "gpus", "status", "words"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, 1, RED, "RM has detected an NVML/RM version mismatch."),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 1, RED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 0, YELLOW, "perhaps a login node (Driver Not Loaded)"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, 1, RED, "but no driver accessible"),
    ],
)
def test_error_of_nvml_is_reported(tmp_path, monkeypatch, error, gpus, status, words):
    ask = nvml(monkeypatch, Init=pynvml.NVMLError(error))
    (finding,) = check_driver(read_driver(machine(tmp_path, None, gpus), ask), 13)
    assert finding.status == status
    assert words in finding.found


def test_hanging_driver_is_not_waited_for(tmp_path, monkeypatch):
    """A process that hangs in the driver does not end when it is killed."""
    process = Mock()
    process.communicate.side_effect = subprocess.TimeoutExpired("python", 20)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: process)
    (finding,) = check_driver(read_driver(machine(tmp_path, "580.1", 1)), 13)
    assert (finding.status, finding.found) == (RED, "the driver gave no answer in 20 s")
    assert (process.kill.called, process.wait.called) == (True, False)


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "words"),
    [
        (Driver(), 13, YELLOW, "no NVIDIA driver is accessible"),
        (Driver(on_bus=8), 13, RED, "8 NVIDIA GPUs on the PCI bus, but no driver accessible"),
        (EIGHT, None, RED, "jax is the build for CPUs"),
        (Driver("570.86", (H100,)), 13, RED, "570.86 is too old for jax's CUDA 13, which needs 580"),
        (Driver("580.1", (H100,)), 13, GREEN, "580.1"),
        (EIGHT, 13, GREEN, f"driver 580.65.06, 8 × {H100}"),
    ],
)
def test_driver_must_fit_build_of_jax(driver, cuda, status, words):
    (finding,) = check_driver(driver, cuda)
    assert finding.status == status
    assert words in finding.found
    assert (finding.advice is None) == (status == GREEN)


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({}, GREEN, "all 8 GPUs"),
        ({"JAX_PLATFORMS": "cpu"}, YELLOW, "JAX_PLATFORMS=cpu hides the GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, GREEN, "2 of 8"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, YELLOW, "Slurm gave this job none of the GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, YELLOW, "1 of 8 are left"),
    ],
)
def test_hidden_gpus_are_named_with_variable(environment, status, words):
    (finding,) = check_visible(EIGHT, environment)
    assert finding.status == status
    assert words in finding.found
