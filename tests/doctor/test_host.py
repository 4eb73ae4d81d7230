"""The machine around the devices, on machines that are made up."""

from dataclasses import replace

from mjax.config import load_config
from mjax.doctor import GREEN, YELLOW
from mjax.doctor.host import check_memory, state_bytes
from mjax.models.build import count_parameters


def machine(folder, groups="0::/\n"):
    """A host with 64 GiB, 60 of them free, and the control groups of this process."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable:  {60 * 2**20} kB\n")
    (folder / "proc/self/cgroup").write_text(groups)
    return folder


def group(folder, path, limit, used, inactive=0):
    """A control group of version 2 with this limit, in GiB or 'max'."""
    place = folder / "sys/fs/cgroup" / path
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text("max\n" if limit == "max" else f"{limit * 2**30}\n")
    (place / "memory.current").write_text(f"{used * 2**30}\n")
    (place / "memory.stat").write_text(f"anon 1\ninactive_file {inactive * 2**30}\nactive_file 7\n")


def test_limit_of_slurm_job_counts(tmp_path):
    root = machine(tmp_path, "1:name=systemd:/\n0::/slurm/job_7/step_0/task_1\n")  # which has no limit of memory
    group(root, "slurm/job_7", 32, used=20, inactive=8)
    group(root, "slurm/job_7/step_0", "max", used=20)
    (finding,) = check_memory(root=root)
    assert finding.found == "20.0 GiB of 32.0 GiB free, the limit of this container or job"
    group(root, "slurm", 48, used=45)  # its other jobs
    group(root, "slurm/job_8", 1, used=0)  # somebody else's
    assert check_memory(root=root)[0].found.startswith("3.0 GiB of 48.0 GiB")


def test_limit_of_cgroup_version_1_counts(tmp_path):
    root = machine(tmp_path, "5:cpuset,cpu:/slurm/job_7\n4:memory:/slurm/job_7\n0::/\n")
    for path, limit in (("", 2**63 - 4096), ("slurm/job_7", 24 * 2**30)):
        place = root / "sys/fs/cgroup/memory" / path
        place.mkdir(parents=True)
        (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (place / "memory.usage_in_bytes").write_text(f"{16 * 2**30}\n")
        (place / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {2 * 2**30}\n")
    (finding,) = check_memory(root=root)
    assert finding.found == "10.0 GiB of 24.0 GiB free, the limit of this container or job"


def test_memory_below_checkpoint_copy_is_yellow(tmp_path):
    config = load_config("gpt_8b")
    root = machine(tmp_path)
    assert state_bytes(config) == 12 * count_parameters(config.model)
    one_host = replace(config, mesh=replace(config.mesh, data=1))
    (finding,) = check_memory(one_host, root)
    assert finding.status == YELLOW
    assert "takes 93.0 GiB of a host with 8 of its 8 GPUs" in finding.found
    (finding,) = check_memory(config, root)
    assert finding.status == GREEN
    assert "takes 1.5 GiB of a host with 8 of its 512 GPUs" in finding.found
