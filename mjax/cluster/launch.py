"""Set up a process before JAX is imported."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from mjax.cluster.hardware import USABLE_FRACTION
from mjax.cluster.huge_pages import SET_BY_MJAX
from mjax.config.bounds import Bounds
from mjax.errors import PrintLine, UsageError
from mjax.utils.files import cache_home, make_private

# Two names of one setting; JAX does not start with both.
MEMORY_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# GiB of host memory that XLA may pin for all GPUs of a process, and its default.
PINNED_LIMIT, PINNED_DEFAULT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
# Variables in which launchers give the number of processes and, if JAX does not read them, the index of this one and
# the address of process 0. The innermost launcher is first.
TORCHRUN, JAX, SKYPILOT = "torchrun", "JAX_NUM_PROCESSES", "SkyPilot"
LAUNCHERS = {
    TORCHRUN: ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),  # WORLD_SIZE alone may mean something else
    "srun": ("SLURM_STEP_NUM_TASKS",),
    "mpirun": ("OMPI_COMM_WORLD_SIZE",),
    JAX: ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"),  # Kubeflow Trainer and files of deploy/
    SKYPILOT: ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
}
SKYPILOT_PORT = 29500  # SkyPilot names hosts only


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Version of NVIDIA's driver; None if none is loaded, or the container hides it. `root` holds /proc."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    loaded = re.search(r"Module\s+(?:for\s+\S+\s+)?(\d+(?:\.\d+)+)", text)
    return loaded[1] if loaded else None


def find_launcher(environment: Mapping[str, str] = os.environ) -> tuple[str, int | None] | None:
    """The launcher that started several processes, and how many if it gives a number; None for a single process."""
    for launcher, names in LAUNCHERS.items():
        count, *details = (environment.get(name, "").strip() for name in names)  # Slurm leaves some empty
        incomplete = launcher == JAX and (count or details[0])  # `with_launcher` names the missing fields
        if not incomplete and not (count and all(details)):
            continue
        if details and (count, details[0]) == ("1", "0"):
            return None
        if details or (parse_number(count) or 2) > 1:  # `processes.start` rejects what is not one
            return launcher, parse_number(count)
    # JAX looks up the other pods of an indexed job with this package. Without it the first pod may be the only one; the
    # others stop with a sentence.
    index = environment.get("JOB_COMPLETION_INDEX")
    has_lookup = "KUBERNETES_SERVICE_HOST" in environment and find_spec("kubernetes") is not None
    return ("Kubernetes", None) if index and (index != "0" or has_lookup) else None


def parse_number(text: str) -> int | None:
    """The number in `text`; None if it is something else."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def variable_error(name: str, allowed: str, environment: Mapping[str, str], variables: str) -> UsageError:
    """The error for a wrong variable of a launcher that sets `variables`."""
    value = environment.get(name, "").strip() or "not set"
    remedy = f"correct it, or unset {variables or 'the variables of the launcher'} to train with one process"
    return UsageError(f"{name} is {value}, but must be {allowed}; {remedy}")


def read_number(
    name: str, minimum: int, maximum: int = 999_999, environment: Mapping[str, str] = os.environ, variables: str = ""
) -> int:
    """Read the number in a variable of a launcher that sets `variables`.

    Raises:
      UsageError: it is not set, or has another value.
    """
    number = parse_number(environment.get(name, "").strip())
    if number is None or not minimum <= number <= maximum:
        raise variable_error(name, f"a number from {minimum} to {maximum}", environment, variables)
    return number


def _slurm_coordinator(environment: Mapping[str, str]) -> str | None:
    """Address of the first host of a step, with JAX's port; None if another variable gives the address.

    JAX reads one bracket at most, at the end of a name: not rack[1-2]node[3-4], nor gpu[01-02]-ib.
    """
    nodes, job = environment.get("SLURM_STEP_NODELIST", ""), parse_number(environment.get("SLURM_JOB_ID", ""))
    first = re.match(r"(?:\[[^]]*]|[^,[])+", nodes)
    if first is None or job is None or environment.get("JAX_COORDINATOR_ADDRESS"):
        return None
    host = re.sub(r"\[(\w+)[^]]*]", r"\1", first[0])
    return f"{host}:{environment.get('JAX_COORDINATOR_PORT') or job % 4096 + 61440}"


def set_variable(name: str, value: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set an environment variable, and remember it."""
    SET_BY_MJAX[name] = environment[name] = value


def claim_gpu_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let XLA use nine tenths of a GPU's memory, and pin as much of the host's as there is, unless the environment says
    otherwise.

    XLA's default is three quarters of a GPU's memory. The rest is for CUDA, cuBLAS and NCCL. `mjax plan` uses the same
    share (`hardware.USABLE_FRACTION`). Host memory is pinned as it is needed, by `train.recompute offload`, and XLA's
    default limit is less than servers have.
    """
    if not any(name in environment for name in MEMORY_FRACTIONS):
        set_variable(MEMORY_FRACTIONS[0], str(USABLE_FRACTION), environment)
    if PINNED_LIMIT not in environment and host_memory() >> 30 > PINNED_DEFAULT:
        set_variable(PINNED_LIMIT, str(host_memory() >> 30), environment)


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# XLA's default for CPUs runs independent operations in any order, which differs between devices: two devices that wait
# for each other in two collectives wait forever (seen with pipe 2 × context 2 × model 4, in one of three starts).
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
# On a small machine XLA has one thread per simulated device. A device blocks one in each collective in which it waits,
# and may wait in two that do not depend on each other. Then another device has no thread, and all wait forever.
THREADS, THREADS_PER_DEVICE, MAX_THREADS = "PJRT_NPROC", 4, 256  # XLA uses at most 256 for computations


def simulate_devices(count: int) -> None:
    """Make JAX see `count` devices on this machine's CPU, for the flag --simulate.

    Raises:
      UsageError: `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"{count} devices cannot be simulated; give 1 or more")
    if "jax" in sys.modules:  # a config file may import it; no device has been used yet
        import jax

        jax.config.update("jax_platforms", "cpu")
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            fix = "call mjax.simulate before the first array, in a notebook after a restart"
            raise UsageError(f"{count} devices cannot be simulated any more: JAX has started; {fix}") from None
    set_variable("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    set_variable("XLA_FLAGS", " ".join(f"{IN_ORDER} {flags} --xla_force_host_platform_device_count={count}".split()))
    if THREADS not in os.environ:
        set_variable(THREADS, str(max(os.cpu_count() or 1, min(THREADS_PER_DEVICE * count, MAX_THREADS))))


STEP, COMPILING = "running the step", "compiling"  # activities of a process, for `watchdog.py` and goodput.json


@dataclass(frozen=True)
class Distributed:
    """Rendezvous of the processes of a run; not needed under srun, mpirun, torchrun, SkyPilot or Kubernetes."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    processes: int | None = None
    """Number of processes."""
    process: int | None = None
    """Index of this process, from 0."""
    start_timeout: Annotated[int, Bounds(ge=5)] = 300
    """Seconds within which all processes have to connect."""
    hang_limit: float | None = None
    """Seconds without a finished step before the run exits with code 1, for a launcher to restart it (by default
    never). Ten times as many while it compiles, evaluates or saves."""

    def with_launcher(self, environment: Mapping[str, str] = os.environ) -> Distributed:
        """The rendezvous that a launcher describes in variables that JAX misreads or ignores, unless flags describe it.

        torchrun itself listens at MASTER_PORT on the first host (unless a PyTorchJob sets these variables without it),
        so process 0 listens at the port above.

        Raises:
          UsageError: a variable is missing or wrong.
        """
        launcher = (find_launcher(environment) or ("",))[0]
        if launcher == "srun" and (self.processes, self.process) == (None, None):
            return replace(self, coordinator=self.coordinator or _slurm_coordinator(environment))
        names = LAUNCHERS.get(launcher, ())
        if len(names) < 3 or (self.processes, self.process) != (None, None):
            return self

        launcher_sets = {"environment": environment, "variables": f"{', '.join(names[:-1])} and {names[-1]}"}
        processes = read_number(names[0], 1, **launcher_sets)
        process = read_number(names[1], 0, processes - 1, **launcher_sets)
        address = environment.get("JAX_COORDINATOR_ADDRESS", "")  # as in JAX, it precedes the launcher's variables
        if launcher in (TORCHRUN, SKYPILOT) and not address:
            host, port = environment[names[2]].split()[0], SKYPILOT_PORT  # SkyPilot has one host a line
            if launcher == TORCHRUN:
                port = read_number(names[3], 1, 65534, **launcher_sets)
                port += environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not self.coordinator and not re.fullmatch(r".+:\d+", address):
            raise variable_error("JAX_COORDINATOR_ADDRESS", "HOST:PORT, such as node0:29500", **launcher_sets)
        return replace(self, coordinator=self.coordinator or address, processes=processes, process=process)

    def coordinator_port(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Port of all addresses at which JAX lets process 0 listen; None if it is unknown."""
        address = self.coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
        port = address.rpartition(":")[2] or environment.get("JAX_COORDINATOR_PORT", "")
        job = re.match("[0-9]+", environment.get("OMPI_MCA_orte_hnp_uri", ""))  # of Open MPI 4
        if environment.get("JAX_COORDINATOR_BIND_ADDRESS") or not (port or job):
            return None
        return parse_number(port) if port else int(job[0]) // 4096 % 4096 + 61440

    @property
    def is_multiprocess(self) -> bool:
        """True if a launcher or the flags define this process as one of several."""
        return find_launcher() is not None or None not in (self.coordinator, self.processes, self.process)


# --- XLA flags. One that XLA does not know ends every process: these hold for the versions of JAX that mjax takes -----

DETERMINISTIC_FLAGS = {
    # The gradient of the embedding is summed in a fixed order instead of by atomics; cuDNN's backward pass too.
    "xla_gpu_exclude_nondeterministic_ops": "true",
    # XLA cannot compile the step with the flag above and Triton's matmuls: 'Failed to get configs'.
    "xla_gpu_enable_triton_gemm": "false",
    # A restart would choose other kernels for matmuls, by their time at that point.
    "xla_gpu_autotune_level": "0",
}
"""For `train.py --deterministic`. They do not affect CPUs, where a run is repeatable anyway."""


def set_deterministic_flags() -> None:
    """Set the flags of DETERMINISTIC_FLAGS; before JAX uses a device.

    Raises:
      UsageError: XLA_FLAGS contradicts them.
    """
    flags = xla_flags()
    for name, value in DETERMINISTIC_FLAGS.items():
        if flags.get(name, value).lower() != value:
            both = f"--deterministic needs --{name}={value}, and XLA_FLAGS has --{name}={flags[name]}"
            raise UsageError(f"{both}; remove one of them")
    if new := [f"--{name}={value}" for name, value in DETERMINISTIC_FLAGS.items() if name not in flags]:
        set_variable("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *new]).strip())


def quick_compile_options(platform: str) -> dict[str, int]:
    """Compiler options for a program that runs once, such as the initialization of weights."""
    level = "xla_backend_optimization_level"
    return {} if platform != "cpu" or level in xla_flags() else {level: 1}


def xla_flags() -> dict[str, str]:
    """The values of the flags in XLA_FLAGS, by name."""
    flags = re.findall(r"--(\w+)(?:=(\S*))?", os.environ.get("XLA_FLAGS", ""))
    return {name: value or "true" for name, value in flags}


def hide_accelerators() -> None:
    """Show JAX the CPU only: work that needs no accelerator must not take the memory of one in use."""
    set_variable("JAX_PLATFORMS", "cpu")


# --- Compiled programs on disk, so that a restart need not compile them again (JAX's persistent cache) ----------------

CACHE_FOLDER, CACHE_LIMIT = "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"
CACHE_BYTES = 2 * 2**30  # JAX removes the programs that were used least recently
CACHE_PROGRAMS = 256  # it looks at each of them whenever it adds one
CACHE_MIN_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"  # JAX's default of a second leaves small programs out
LOCK_TIMEOUT = 2.0  # seconds for another process that has locked the folder


def program_cache_folder() -> Path | None:
    """The folder of this machine's programs; None without a home.

    Machines with other processors that share the home have separate folders: XLA would run programs for a CPU with
    instructions that this one lacks.
    """
    home = cache_home()
    try:
        processor = re.search(r"^(flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        processor = None
    kind = hashlib.sha256((processor[0] if processor else platform.processor()).encode()).hexdigest()[:8]
    return None if home is None else home / "programs" / f"{platform.machine()}-{kind}"


def find_cache_problem(folder: Path) -> str | None:
    """Return the reason why `folder`, which is created, cannot store programs; None if it can.

    Programs are machine code that runs when it is loaded, so no one else may write there.
    """
    try:
        if problem := make_private(folder):
            return problem
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
    return None


def prune_programs(folder: Path) -> str | None:
    """Remove programs that were not written completely, and all but the `CACHE_PROGRAMS` that were used last.

    JAX locks the folder, writes a program and then the time of its last use. A process that is killed in between, on
    this host or another, leaves a program that JAX neither reads nor replaces, and a folder to which it adds no more.

    Returns:
      The reason why the folder cannot be locked; None if it can.
    """
    from filelock import FileLock, Timeout

    programs: list[tuple[float, Path, Path]] = []  # with the time of the last use, and the file that has it
    try:
        with FileLock(folder / ".lockfile", timeout=LOCK_TIMEOUT):
            for program in folder.glob("*-cache"):
                last_use = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
                is_complete = last_use.exists() and program.stat().st_size > 0
                programs.append((last_use.stat().st_mtime if is_complete else 0.0, last_use, program))
            for number, (time, *files) in enumerate(sorted(programs, reverse=True)):
                if not time or number >= CACHE_PROGRAMS:
                    for file in files:
                        file.unlink(missing_ok=True)
    except Timeout:
        return f"another process has locked {folder}"
    except (OSError, NotImplementedError) as error:
        return f"{folder} cannot be locked ({error})"
    return None


def enable_compilation_cache(multiprocess: bool | None = None, print_line: PrintLine | None = None) -> None:
    """Let JAX store compiled programs; before it compiles the first one.

    Nothing changes if the user has set JAX_COMPILATION_CACHE_DIR, to a folder or to nothing. Nothing changes with
    several processes, either: on GPUs they measure kernels together while they compile, and a process that does not
    compile would leave the others waiting.

    Args:
      multiprocess: whether this process is one of several; by default as the launcher defines.
      print_line: called with one sentence if nothing can be stored; by default it goes to stderr.
    """
    print_line = print_line or (lambda line: print(line, file=sys.stderr))
    multiprocess = find_launcher() is not None if multiprocess is None else multiprocess
    jax = sys.modules.get("jax")  # a config file may import it; nothing is compiled yet
    if multiprocess or CACHE_FOLDER in os.environ or (jax is not None and jax.config.jax_compilation_cache_dir):
        return
    cache = program_cache_folder()
    problem = "there is no home folder" if cache is None else find_cache_problem(cache) or prune_programs(cache)
    if problem is not None:
        print_line(f"{problem}: programs are compiled at every start; name another folder with {CACHE_FOLDER}")
        return
    for name, value in ((CACHE_FOLDER, str(cache)), (CACHE_LIMIT, str(CACHE_BYTES)), (CACHE_MIN_SECONDS, "0")):
        if name not in os.environ:
            set_variable(name, value)
    if jax is not None:
        jax.config.update("jax_compilation_cache_dir", os.environ[CACHE_FOLDER])
        jax.config.update("jax_compilation_cache_max_size", int(os.environ[CACHE_LIMIT]))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(os.environ[CACHE_MIN_SECONDS]))
