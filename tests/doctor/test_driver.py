"""The driver and what hides GPUs, on machines that are made up."""

import subprocess

import pytest

from mjax.doctor.driver import Driver, check_driver, check_libraries, check_visible, read_driver
from mjax.doctor.finding import GREEN, RED, YELLOW

H100 = "NVIDIA H100 80GB HBM3"
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * 2**30,) * 8, (0.0,) * 8, on_bus=8)


def machine(folder, driver=None, gpus=0):
    """Files as Linux shows them for so many NVIDIA GPUs, with this version of the driver loaded."""
    if driver:
        file = folder / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
    for index in range(gpus):
        device = folder / f"sys/bus/pci/devices/0000:{index:02}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    bridge = folder / "sys/bus/pci/devices/0000:99:00.0"  # NVIDIA's NVSwitch is no GPU
    bridge.mkdir(parents=True)
    (bridge / "vendor").write_text("0x10de\n")
    (bridge / "class").write_text("0x068000\n")
    return folder


def fails(error):
    def ask(command):
        raise error

    return ask


def test_driver_is_read_from_nvidia_smi(tmp_path):
    rows = f"{H100}, 580.65.06, 81559, 4\n{H100}, 580.65.06, 81559, 60000\n"
    driver = read_driver(machine(tmp_path, "580.65.06", 2), lambda command: rows)
    assert driver.version == "580.65.06"
    assert driver.gpus == (H100, H100)
    assert driver.on_bus == 2
    (finding,) = check_driver(driver, 13)
    assert finding.status == YELLOW
    assert "58.6 GiB of GPU 1" in finding.found


def test_driver_is_read_from_kernel_without_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    root = machine(tmp_path, "535.104.05", 1)
    assert read_driver(root) == Driver("535.104.05", on_bus=1)
    information = root / "proc/driver/nvidia/gpus/0000:00:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t\t {H100}\nIRQ:   \t\t 189\n")
    assert read_driver(root) == Driver("535.104.05", (H100,), on_bus=1)


def test_updated_driver_asks_for_a_reboot(tmp_path):
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.65"
    error = subprocess.CalledProcessError(18, "nvidia-smi", output=said)
    (finding,) = check_driver(read_driver(machine(tmp_path), fails(error)), 13)
    assert finding.status == RED
    assert finding.advice.startswith("reboot")


@pytest.mark.parametrize(("gpus", "status"), [(0, YELLOW), (1, RED)])
@pytest.mark.parametrize("said", ["No devices were found", "NVIDIA-SMI couldn't find libnvidia-ml.so library in …"])
def test_node_without_gpu_is_yellow(tmp_path, gpus, status, said):
    """And a machine whose GPU on the bus does not answer is red."""
    driver = read_driver(machine(tmp_path, gpus=gpus), fails(subprocess.CalledProcessError(9, "nvidia-smi", said)))
    (finding,) = check_driver(driver, 13)
    assert finding.status == status
    assert said in finding.found
    assert ("srun --gpus-per-node 1" in finding.advice) == (gpus == 0)


def test_hanging_nvidia_smi_is_killed(tmp_path, monkeypatch):
    """Without waiting for it: a process that hangs in the driver does not end when it is killed."""

    class Hangs:
        waited = killed = False

        def __init__(self, command, **_):
            assert command[0] == "nvidia-smi"

        def communicate(self, timeout):
            raise subprocess.TimeoutExpired("nvidia-smi", timeout)

        def kill(self):
            Hangs.killed = True

        def wait(self):
            Hangs.waited = True

    monkeypatch.setattr("mjax.doctor.driver.shutil.which", lambda name: name)
    monkeypatch.setattr(subprocess, "Popen", Hangs)
    (finding,) = check_driver(read_driver(machine(tmp_path, "580.1", 1)), 13)
    assert (finding.status, finding.found) == (RED, "nvidia-smi gave no answer in 20 s")
    assert (Hangs.killed, Hangs.waited) == (True, False)


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "words"),
    [
        (Driver(), None, GREEN, "no NVIDIA GPU on this machine"),
        (Driver(), 13, YELLOW, "no NVIDIA driver is accessible"),
        (Driver(on_bus=8), 13, RED, "8 NVIDIA GPUs on the PCI bus, but no driver accessible"),
        (Driver(on_bus=1), None, YELLOW, "1 NVIDIA GPU on the PCI bus"),
        (EIGHT, None, RED, "jax is the build for CPUs"),
        (Driver("570.86", (H100,)), 13, RED, "570.86 is too old for jax's CUDA 13, which needs 580"),
        (Driver("580.1", (H100,)), 13, GREEN, "580.1"),
        (Driver("570.86", (H100,)), 12, GREEN, "570.86"),
        (EIGHT, 13, GREEN, f"driver 580.65.06, 8 × {H100}"),
    ],
)
def test_driver_must_fit_build_of_jax(driver, cuda, status, words):
    (finding,) = check_driver(driver, cuda)
    assert finding.status == status
    assert words in finding.found
    assert (finding.advice is None) == (status == GREEN)


def test_old_driver_gets_jax_that_runs_on_it():
    older, newer = (check_driver(Driver(version, (H100,)), 13)[0].advice for version in ("470.1", "570.86"))
    assert older == "install NVIDIA driver 580 or newer"
    assert newer == f'pip install "jax[cuda12]", or {older}'


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({}, GREEN, "all 8 GPUs"),
        ({"JAX_PLATFORMS": "cpu"}, YELLOW, "JAX_PLATFORMS=cpu hides the GPUs"),
        ({"CUDA_VISIBLE_DEVICES": ""}, YELLOW, "hides all 8 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, GREEN, "2 of 8"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, YELLOW, "Slurm gave this job none of the GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-7c6e"}, GREEN, "a slice of a GPU, by"),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, YELLOW, "1 of 8 are left"),
    ],
)
def test_hidden_gpus_are_named_with_variable(environment, status, words):
    (finding,) = check_visible(EIGHT, environment)
    assert finding.status == status
    assert words in finding.found


def test_another_cuda_before_jaxs_is_yellow(tmp_path):
    (tmp_path / "libcudnn.so.8").touch()
    environment = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    (finding,) = check_libraries(environment, 13)
    assert finding.advice == "unset LD_LIBRARY_PATH"
    assert check_libraries(environment, None) == check_libraries({}, 13) == []
