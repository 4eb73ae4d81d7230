"""The driver and what hides GPUs, on machines that are made up."""

import subprocess
from unittest.mock import Mock

import pytest

from mjax.doctor.driver import Driver, check_driver, check_visible, read_driver
from mjax.doctor.finding import GREEN, RED, YELLOW

H100 = "NVIDIA H100 80GB HBM3"
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * 2**30,) * 8, (0.0,) * 8, on_bus=8)


def machine(folder, driver=None, gpus=0):
    """Files as Linux shows them for so many NVIDIA GPUs, with this version of the driver loaded."""
    if driver:
        file = folder / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
    for index, kind in [*((gpu, "0x030200") for gpu in range(gpus)), (99, "0x068000")]:  # NVIDIA's NVSwitch is no GPU
        device = folder / f"sys/bus/pci/devices/0000:{index:02}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(f"{kind}\n")
    return folder


def test_driver_is_read_from_nvidia_smi(tmp_path):
    rows = f"{H100}, 580.65.06, 81559, 4\n{H100}, 580.65.06, 81559, 60000\n"
    driver = read_driver(machine(tmp_path, "580.65.06", 2), lambda command: rows)
    assert driver.version == "580.65.06"
    assert driver.gpus == (H100, H100)
    assert driver.on_bus == 2
    (finding,) = check_driver(driver, 13)
    assert finding.status == YELLOW
    assert "58.6 GiB of GPU 1" in finding.found


def test_hanging_nvidia_smi_is_killed(tmp_path, monkeypatch):
    """Without waiting for it: a process that hangs in the driver does not end when it is killed."""

    process = Mock()
    process.communicate.side_effect = subprocess.TimeoutExpired("nvidia-smi", 20)
    monkeypatch.setattr("mjax.doctor.driver.shutil.which", lambda name: name)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: process)
    (finding,) = check_driver(read_driver(machine(tmp_path, "580.1", 1)), 13)
    assert (finding.status, finding.found) == (RED, "nvidia-smi gave no answer in 20 s")
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
