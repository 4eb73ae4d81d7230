"""Huge pages for the heap of a process. It imports next to nothing: Python starts again here."""

import os
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"
SET_BY_MJAX: dict[str, str] = {}  # environment variables that mjax has set in this process, for environment.json


def restart_with_huge_pages() -> None:
    """On a CPU, restart this process with huge pages for its heap, once.

    XLA maps its arena of activations again at every step; with 4 KiB pages a step of a gigabyte begins with 300,000
    page faults, an eighth of its time. The C library reads the setting before `main`, so it cannot be set from inside.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if tunables.endswith(HUGE_PAGES):  # this is the restarted process
        SET_BY_MJAX["GLIBC_TUNABLES"] = tunables
    if sys.platform != "linux" or has_nvidia_gpu() or "glibc.malloc.hugetlb" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}".lstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_nvidia_gpu() -> bool:
    """True if this machine has an NVIDIA device; it is not used to check."""
    programs = (os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path())
    return any(map(os.path.exists, ("/dev/nvidia0", "/proc/driver/nvidia", *programs)))
