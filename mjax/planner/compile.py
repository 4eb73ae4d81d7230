"""Compiling the train step for absent NVIDIA GPUs.

XLA needs no GPU to compile for one, only a description. `targets/` has a file for each GPU in XLA's own format
(GpuTargetConfigProto), and a topology of servers gives a mesh of virtual devices. The step is the one that training
runs, from `build_program`, with the XLA flags of this process.

The result is what a cluster would compile, with one difference: nothing can be measured here, so XLA uses its default
tiles for matrix products (Triton's) where on a GPU it times several, including cuBLAS's. Collectives, their order and
memory hardly depend on that; the speed of matrix products does. `benchmarks/aot/` reads the compiled program: bytes of
collectives, what overlaps them, and kernels.

It needs the CUDA wheels (jax[cuda13]), which contain the compiler for NVIDIA GPUs; no driver, no GPU.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mjax.cluster.hardware import gpu_named
from mjax.config import Config
from mjax.config.kernels import resolved_on_gpu, with_unrolling
from mjax.errors import RunError, UsageError
from mjax.planner import Section, layers_in_words
from mjax.planner.memory import Memory, predict_memory
from mjax.utils.figures import GIB, named_rows
from mjax.utils.packages import cuda_build, installed

SHEETS = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class AllocatedMemory:
    """Bytes on one device, as allocated by XLA.

    Attributes:
      arguments: state and batch.
      outputs: results.
      aliased: outputs that reuse memory of arguments: the new state that of the old.
      temporaries: everything that lives within a step: the weights in the compute dtype, gradients, activations.
      peak: the maximum of all these at one time.
      host: temporaries in host memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes that have to fit: XLA allocates the temporaries in one block, so this is more than `peak`."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class Compilation:
    """A step compiled ahead of time.

    Attributes:
      gpu: name of the target file: h100.
      device_kind: JAX's name for this GPU.
      gpu_memory: bytes of a device, from the target file.
      config: with the compiled attention kernel, and with or without a loop over the layers.
      tracing, compiling: seconds.
      memory: allocated by XLA.
      text: the scheduled HLO.
      step: the `TrainProgram` whose step it is, on a mesh of these GPUs.
    """

    gpu: str
    device_kind: str
    gpu_memory: int
    config: Config
    tracing: float
    compiling: float
    memory: AllocatedMemory
    text: str
    step: Any


def sheet_names() -> list[str]:
    """The GPUs with a target file."""
    return sorted(file.stem for file in SHEETS.glob("*.txtpb"))


def check_compile(config: Config, gpu: str | None, per_server: int = 8) -> None:
    """Refuse what cannot be compiled, before JAX is imported.

    Raises:
      UsageError: there is no target file for the GPU, or the mesh does not fill its servers, or the CUDA wheels are
        missing.
    """
    names = sheet_names()
    if gpu is None:
        raise UsageError(f"--compile needs a GPU to compile for; add --gpu with one of {', '.join(names)}")
    if gpu not in names:
        raise UsageError(f"--gpu {gpu} cannot be compiled for; use one of {', '.join(names)}")
    devices = config.mesh.devices
    if devices > per_server and devices % per_server:
        raise UsageError(
            f"a mesh of {devices} devices does not fill servers of {per_server}; change --mesh.data, or use "
            f"--devices-per-node {max(n for n in range(1, per_server + 1) if devices % n == 0)}"
        )
    if cuda_build() is None:
        raise UsageError(
            "--compile needs the compiler for NVIDIA GPUs, which is in JAX's CUDA wheels (no GPU and no driver is "
            "needed); type: pip install 'jax[cuda13]'"
        )


def compile_step(
    config: Config,
    gpu: str,
    per_server: int = 8,
    announce: Callable[[str], None] = lambda _: None,
    options: dict[str, Any] | None = None,
) -> Compilation:
    """Compile the train step of `config` for its mesh of GPUs, which need not exist.

    `launch.leave_accelerators_alone` has to be called before JAX is imported: JAX would look for GPUs and fail.

    Args:
      config: validated; `model.attention` auto is resolved as on a GPU.
      gpu: name of a target file.
      per_server: GPUs per server.
      announce: called with the name of each phase; they take seconds to minutes.
      options: of XLA, by name, besides the flags of this process.

    Raises:
      UsageError: JAX or cuDNN does not support the config.
      RunError: XLA cannot compile the step.
    """
    import jax
    from jax.experimental.topologies import get_topology_desc

    from mjax.parallel.mesh import make_mesh
    from mjax.step.step import build_program

    sizes = config.mesh
    config = resolved_on_gpu(config, gpu_named(gpu).compute_capability)
    config = with_unrolling(config, on_gpu=True)
    servers, sheet = max(1, sizes.devices // per_server), (SHEETS / f"{gpu}.txtpb").read_text()
    topology = get_topology_desc(
        platform="cuda",
        topology=f"1x{servers}x{min(sizes.devices, per_server)}",  # slices × servers × GPUs of a server
        target_config=sheet,
    )
    mesh, device_kind = make_mesh(sizes, topology.devices), topology.devices[0].device_kind

    announce("tracing the step")
    began = time.perf_counter()
    program = build_program(config, mesh)
    try:
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    except NotImplementedError as error:
        # JAX asks its GPU what cuDNN supports. Here it finds none, and assumes the oldest.
        raise UsageError(
            f"JAX does not lower cuDNN's attention here: {str(error).splitlines()[0]} Without a GPU it assumes "
            "one older than Hopper; add --model.attention xla"
        ) from error
    traced = time.perf_counter()
    announce(f"compiling for {sizes.devices:,} × {device_kind}")
    try:
        with _without_compilation_cache():
            compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"XLA cannot compile this step for {gpu}: {str(error).splitlines()[0]}") from error
    done = time.perf_counter()
    stats = compiled.memory_analysis()
    return Compilation(
        gpu=gpu,
        device_kind=device_kind,
        gpu_memory=int(re.search(r"device_memory_size: (\d+)", sheet)[1]),
        config=config,
        tracing=traced - began,
        compiling=done - traced,
        memory=AllocatedMemory(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.peak_memory_in_bytes,
            stats.host_temp_size_in_bytes,
        ),
        text=compiled.as_text(),
        step=program,
    )


@contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Disable JAX's persistent cache: without a GPU JAX cannot read its entries, and complains at length."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is used is decided once per process
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def versions() -> dict[str, str]:
    """Versions of the compiler: JAX, and its CUDA plugin."""
    packages = installed()
    return {name: packages[name] for name in ("jax", "jaxlib", f"jax-cuda{cuda_build()}-plugin") if name in packages}


# --- The section of a plan --------------------------------------------------------------------------------------------


def compile_section(compiled: Compilation, formula: Memory) -> Section:
    """The section of a plan: memory as allocated and as predicted by `formula`, and the program's collectives."""
    memory = compiled.memory
    operations = r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    collectives = Counter(re.findall(operations, compiled.text))
    values = {
        "gpu": compiled.gpu,
        "device_kind": compiled.device_kind,
        "attention": compiled.config.model.attention,
        "unrolled": compiled.config.train.unroll == "on",
        "seconds": {"tracing": compiled.tracing, "compiling": compiled.compiling},
        "memory": asdict(memory)
        | {"total": memory.total, "formula": formula.total, "host_formula": formula.host, "gpu": compiled.gpu_memory},
        "collectives": dict(collectives),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    rows = {
        "compiled by": ", ".join(f"{package} {number}" for package, number in values["versions"].items()),
        "XLA flags": values["xla_flags"] or "none",
        "attention": values["attention"],
        "layers": layers_in_words(values["unrolled"]),
        "took": f"{compiled.tracing:.1f} s tracing, {compiled.compiling:.1f} s compiling",
        "memory": f"{memory.total / GIB:.2f} GiB on each device, {memory.temporaries / GIB:.2f} of them temporaries; "
        f"the formula predicts {formula.total / GIB:.2f} GiB, {formula.total / memory.total - 1:+.1%}",
        "collectives": ", ".join(f"{count:,} × {name}" for name, count in sorted(collectives.items())) or "none",
    }
    if memory.host or formula.host:
        rows["host memory"] = f"{memory.host / GIB:.2f} GiB; the formula predicts {formula.host / GIB:.2f} GiB"
    return Section(f"Compiled for {compiled.device_kind}", values, named_rows(rows))


def compile_and_tell(config: Config, gpu: str, per_server: int) -> Section:
    """Compile the step of a checked config, and report on it; arguments as for `compile_step`."""
    compiled = compile_step(config, gpu, per_server, announce)
    return compile_section(compiled, predict_memory(compiled.config, gpu_named(gpu).compute_capability))


def announce(phase: str) -> None:
    """Print what begins on stderr: it takes seconds to minutes."""
    print(f"mjax: {phase} …", file=sys.stderr, flush=True)
