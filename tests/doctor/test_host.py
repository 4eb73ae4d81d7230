"""The machine around the devices, on machines that are made up: memory, disk, packages and driver."""

import errno
import os
from collections import namedtuple
from dataclasses import replace
from unittest.mock import Mock

import pynvml
import pytest

from mjax.config import load_config
from mjax.doctor import GREEN, RED, YELLOW, MachineInfo, host
from mjax.models.build import count_parameters
from mjax.utils import packages

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A host with 64 GiB, 60 of them free, and the control groups of this process."""

    def machine(groups="0::/\n"):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable:  {60 * 2**20} kB\n")
        (tmp_path / "proc/self/cgroup").write_text(groups)
        monkeypatch.setattr(host, "ROOT", tmp_path)
        return tmp_path

    return machine


def group(root, path, limit, used, inactive=0):
    """A control group of version 2 with this limit, in GiB or 'max'."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit == "max" else f"{limit * GIB}\n")
    (folder / "memory.current").write_text(f"{used * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive * GIB}\nactive_file 7\n")


def test_limit_of_slurm_job_counts(machine):
    root = machine("1:name=systemd:/\n0::/slurm/job_7/step_0/task_1\n")  # which has no limit of memory
    group(root, "slurm/job_7", 32, used=20, inactive=8)
    group(root, "slurm/job_7/step_0", "max", used=20)
    assert host.check_memory(MachineInfo()).message == "20.00 GiB of 32.00 GiB free, the limit of this container or job"
    group(root, "slurm", 48, used=45)  # its other jobs
    group(root, "slurm/job_8", 1, used=0)  # somebody else's
    assert host.check_memory(MachineInfo()).message.startswith("3.00 GiB of 48.00 GiB")


def test_limit_of_cgroup_version_1_counts(machine):
    root = machine("5:cpuset,cpu:/slurm/job_7\n4:memory:/slurm/job_7\n0::/\n")
    for path, limit in (("", 2**63 - 4096), ("slurm/job_7", 24 * GIB)):
        folder = root / "sys/fs/cgroup/memory" / path
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{16 * GIB}\n")
        (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n")
    assert host.check_memory(MachineInfo()).message == "10.00 GiB of 24.00 GiB free, the limit of this container or job"


def test_memory_below_checkpoint_copy_is_yellow(machine):
    machine()
    config = load_config("gpt_8b")
    assert host.state_bytes(config) == 12 * count_parameters(config.model)
    finding = host.check_memory(MachineInfo(config=replace(config, mesh=replace(config.mesh, data=1))))
    assert finding.status == YELLOW
    assert "takes 92.95 GiB of a host with 8 of its 8 GPUs" in finding.message
    finding = host.check_memory(MachineInfo(config=config))
    assert finding.status == GREEN
    assert "takes 1.45 GiB of a host with 8 of its 512 GPUs" in finding.message


# --- The disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """Make a disk with so much room and such rates; this machine's is not what is tested here."""

    def disk(free=400 * GIB, write=1e9):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage(GIB, GIB, free))
        monkeypatch.setattr(host, "measure", lambda folder: (write, 1e9))

    return disk


@pytest.fixture
def small_file(monkeypatch):
    monkeypatch.setattr(host, "FILE_BYTES", 2**20)
    monkeypatch.setattr(host, "SLOW", 1.0)


def test_absent_folder_is_not_made(tmp_path, small_file):
    finding = host.check_storage(MachineInfo(runs=tmp_path / "runs" / "deep"))
    assert finding.status == GREEN
    assert f"{tmp_path} (where" in finding.message
    assert finding.figures["write_mb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "code", "advice"),
    [
        (host.tempfile, "TemporaryFile", errno.EROFS, "make it writable"),
        (os, "fsync", errno.ENOSPC, "free some space"),
    ],
    ids=["read-only", "full"],
)
def test_failing_disk_is_red(tmp_path, small_file, monkeypatch, module, name, code, advice):
    monkeypatch.setattr(module, name, Mock(side_effect=OSError(code, os.strerror(code))))
    finding = host.check_storage(MachineInfo(runs=tmp_path))
    assert finding.status == RED
    assert finding.advice.startswith(advice)
    assert list(tmp_path.iterdir()) == []


def test_lost_bytes_are_red(tmp_path, small_file, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.ftruncate(descriptor, 10))
    finding = host.check_storage(MachineInfo(runs=tmp_path))
    assert finding.status == RED
    assert "the bytes read are not those written" in finding.message


@pytest.mark.parametrize(
    ("config", "free", "write", "status"),
    [
        ("gpt_8b", 270, 1e9, RED),  # 93 GiB a checkpoint, two are kept while a third is written
        ("gpt_8b", 300, 1e9, GREEN),
        (None, 0.5, 1e9, YELLOW),
        (None, 10, 20e6, YELLOW),
        (None, 10, 900e6, GREEN),
    ],
)
def test_room_and_speed_are_judged(tmp_path, disk, config, free, write, status):
    disk(free * GIB, write)
    finding = host.check_storage(MachineInfo(config=config and load_config(config), runs=tmp_path))
    assert finding.status == status
    assert config is None or "; 3 checkpoints of 92.95 GiB will be saved" in finding.message


def test_written_checkpoints_need_no_room_again(tmp_path, disk):
    disk(100 * GIB)
    facts = MachineInfo(config=load_config("gpt_8b"), name="gpt_8b", runs=tmp_path)
    for name, status in (("200", RED), ("300.writing", RED), ("300", GREEN), ("400", GREEN)):
        (tmp_path / "gpt_8b/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "gpt_8b/checkpoints" / name / "manifest.json").touch()
        finding = host.check_storage(facts)
        assert finding.status == status
        assert status == GREEN or finding.message.endswith("185.90 GiB are needed")
    assert host.check_storage(replace(facts, runs=tmp_path / "gpt_8b")).status == GREEN
    assert host.check_storage(replace(facts, name="another")).status == RED


def test_link_to_nowhere_is_red(tmp_path):
    (tmp_path / "runs").symlink_to("absent")
    assert host.check_storage(MachineInfo(runs=tmp_path / "runs")).status == RED


# --- The installation -----------------------------------------------------------------------------------------------


H100 = "NVIDIA H100 80GB HBM3"
EIGHT = host.Driver("580.65.06", (H100,) * 8, (80 * 2**30,) * 8, (0.0,) * 8, on_bus=8)


def pretend(monkeypatch, **versions):
    """Install these packages too, or remove those with version None, and any other plugin for CUDA."""
    installed = {name: version for name, version in packages.list_versions().items() if not name.startswith("jax-cuda")}
    installed |= {name.replace("_", "-"): version for name, version in versions.items()}
    installed = {name: version for name, version in installed.items() if version is not None}
    monkeypatch.setattr(packages, "list_versions", lambda: installed)


@pytest.mark.parametrize(("version", "status"), [("3.10.4", RED), ("3.13.0", GREEN), ("3.14.0", YELLOW)])
def test_python_is_one_of_those_tested(monkeypatch, version, status):
    monkeypatch.setattr(host.platform, "python_version", lambda: version)
    finding = host.check_python(MachineInfo())
    assert (finding.status, finding.message.startswith(version)) == (status, True)


def test_installed_packages_fit():
    assert [check(MachineInfo()).status for check in (host.check_packages, host.check_jax)] == [GREEN, GREEN]


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
    finding = host.check_packages(MachineInfo())
    assert (finding.status, finding.message.startswith(words)) == (status, True)
    assert finding.advice.startswith(f'pip install "{package.replace("_", "-")}')


JAXLIB = packages.list_versions()["jaxlib"]


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
    assert host.check_jax(MachineInfo()).status == status


def test_other_libraries_are_yellow(monkeypatch, tmp_path):
    pretend(monkeypatch, **{f"jax_cuda13_{half}": JAXLIB for half in ("plugin", "pjrt")})
    (tmp_path / "libcudnn.so.9").touch()
    finding = host.check_jax(MachineInfo(environment={"LD_LIBRARY_PATH": f":{tmp_path}"}))
    assert (finding.status, finding.advice) == (YELLOW, "unset LD_LIBRARY_PATH")
    assert "libcudnn.so.9" in finding.message


# --- The driver -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch):
    """Make files as Linux shows them for so many NVIDIA GPUs, with this version of the driver, and NVML's answers."""

    def make(driver=None, gpus=0, **functions):
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
        return host.read_driver()

    return make


def judge(monkeypatch, driver, cuda):
    monkeypatch.setattr(host, "read_driver", lambda: driver)
    monkeypatch.setattr(packages, "cuda_build", lambda: cuda)
    return host.check_driver(MachineInfo())


def test_driver_is_read_from_nvml(gpu_machine, monkeypatch):
    memory = [Mock(total=80 * 2**30, used=2**20), Mock(total=80 * 2**30, used=60 * 2**30)]
    driver = gpu_machine("580.65.06", 2, DeviceGetCount=2, DeviceGetMemoryInfo=memory)
    assert driver == host.Driver("580.65.06", (H100,) * 2, (80 * 2**30,) * 2, (2**20, 60 * 2**30), on_bus=2)
    finding = judge(monkeypatch, driver, 13)
    assert finding.status == YELLOW
    assert "60.00 GiB of GPU 1" in finding.message


def test_gpu_that_shares_memory_is_listed(gpu_machine):
    error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver = gpu_machine("580.65.06", 1, DeviceGetCount=1, DeviceGetMemoryInfo=error)
    assert driver == host.Driver("580.65.06", (H100,), on_bus=1)


@pytest.mark.parametrize(
    ("error", "gpus", "status", "words"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, 1, RED, "RM has detected an NVML/RM version mismatch."),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 1, RED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 0, YELLOW, "perhaps a login node"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, 1, RED, "1 × NVIDIA GPU, but no driver"),
    ],
)
def test_error_of_nvml_is_reported(gpu_machine, monkeypatch, error, gpus, status, words):
    finding = judge(monkeypatch, gpu_machine(None, gpus, Init=pynvml.NVMLError(error)), 13)
    assert finding.status == status
    assert words in finding.message


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "words"),
    [
        (host.Driver(), None, GREEN, "no NVIDIA GPU"),
        (host.Driver(), 13, YELLOW, "there is no driver"),
        (host.Driver(on_bus=8), 13, RED, "8 × NVIDIA GPU, but no driver"),
        (EIGHT, None, RED, "jax is a CPU build and cannot use them"),
        (host.Driver("570.86", (H100,)), 13, RED, "CUDA 13 needs driver 580 or newer"),
        (host.Driver("580.1", (H100,)), 13, GREEN, "580.1"),
        (EIGHT, 13, GREEN, f"driver 580.65.06, 8 × {H100}"),
    ],
)
def test_driver_must_fit_build_of_jax(monkeypatch, driver, cuda, status, words):
    finding = judge(monkeypatch, driver, cuda)
    assert finding.status == status
    assert words in finding.message
    assert (finding.advice is None) == (status == GREEN)
