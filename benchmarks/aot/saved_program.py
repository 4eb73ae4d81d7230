"""The train step in a file: what `step.py --save-program FILE` writes and `open_program` reads.

The file is a zip archive of

    manifest.json     the config, mesh and GPU, versions and flags, the names, shapes and dtypes of all arguments
    step.stablehlo    the step as given to XLA, by `jax.export`: any JAX of the next half year compiles it
    scheduled.hlo     the result of XLA on this machine, for people

It has no machine code, for two reasons. JAX's only reader of machine code unpickles it, and unpickling can run any
code; this archive is JSON, a flatbuffer and text, so one from outside can be opened safely. And code compiled without a
GPU has XLA's default tiles in its matrix products, which the compiler on the cluster autotunes.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mjax.config import Config, axes
from mjax.errors import UsageError, check_folder
from mjax.utils.files import put

FORMAT = 1
# Maximum unpacked size in bytes. A step has no weights: that of gpt_8b in a pipeline takes 144 kB.
LARGEST = 2**28


@dataclass(frozen=True)
class SavedProgram:
    """A step read from a file.

    Attributes:
      manifest: see the module's docstring.
      step: `jax.export.Exported`; `jax.jit(step.call)` takes the leaves of (state, batch), placed on a mesh with as
        many devices as it was written for, and returns the leaves of (new state, metrics).
    """

    manifest: dict[str, Any]
    step: Any


def check_save(file: Path) -> None:
    """Refuse an output file that cannot be written.

    Raises:
      UsageError: its folder is missing, or the package that writes the format is.
    """
    if file.is_dir():
        raise UsageError(f"--save-program {file} is a folder; give a file, such as {file / 'step.mjax'}")
    check_folder("--save-program", file)
    if importlib.util.find_spec("flatbuffers") is None:
        raise UsageError("--save-program needs the package of JAX's program format; type: pip install flatbuffers")


def save_program(file: Path, config: Config, program, platform: str, facts: dict[str, Any], scheduled: str) -> None:
    """Write the step of `program` to `file`, atomically.

    Args:
      file: replaced if it exists.
      config: config of the program.
      program: a `TrainProgram`; its mesh may have absent devices.
      platform: of the devices that will run it: cuda, or cpu.
      facts: further plain values for the manifest.
      scheduled: HLO of the compiled program.
    """
    import jax
    from jax import export

    from mjax.parallel.weights import leaf_name

    # Leaves rather than trees: a file without our classes needs none to be read.
    arguments = (program.abstract_state, program.abstract_batch)
    leaves, structure = jax.tree.flatten(arguments)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(arguments)[0]]
    step = jax.jit(lambda *leaves: jax.tree.leaves(program.train_step(*jax.tree.unflatten(structure, leaves))))
    # JAX does not promise stability of the cuDNN calls for attention: a newer JAX may refuse them with a message.
    unpromised = [export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{part}") for part in ("", "Backward")]
    exported = export.export(step, platforms=[platform], disabled_checks=unpromised)(*leaves)
    mesh = config.mesh
    manifest = {
        "format": FORMAT,
        "config": asdict(config),
        "platform": platform,
        "mesh": axes.sizes(mesh),
        "arguments": [
            {
                "name": leaf_name(path[1:]),
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "spec": str(leaf.sharding.spec),
            }
            for path, leaf in zip(paths, leaves, strict=True)
        ],
        **facts,
    }
    temporary = file.with_name(file.name + ".tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", json.dumps(manifest, indent=1))
            archive.writestr("step.stablehlo", bytes(exported.serialize()))
            archive.writestr("scheduled.hlo", scheduled)
        put(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_program(file: Path) -> SavedProgram:
    """Read a file of `save_program`. Nothing in the file is executed before its step is called.

    Raises:
      UsageError: it is not such a file, is damaged or far too large, or was written in another format.
    """
    from jax import export

    try:
        with zipfile.ZipFile(file) as archive:
            manifest, step = json.loads(_unpacked(archive, "manifest.json")), _unpacked(archive, "step.stablehlo")
        if not isinstance(manifest, dict):
            raise ValueError("its manifest is not an object")
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{file} is not a program that benchmarks/aot/step.py wrote, or it is damaged ({error})"
        ) from error
    if manifest.get("format") != FORMAT:
        raise UsageError(
            f"{file} has format {manifest.get('format')} and this mjax reads {FORMAT}; write it again with "
            "benchmarks/aot/step.py --save-program"
        )
    try:
        return SavedProgram(manifest, export.deserialize(bytearray(step)))
    except Exception as error:  # flatbuffers may raise anything on damaged bytes
        raise UsageError(f"{file}: the step in it is damaged ({error}); write it again") from error


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file of the archive; at most LARGEST bytes are unpacked, since a small archive can unpack to any size."""
    with archive.open(name) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"its {name} has more than {LARGEST:,} bytes")
    return content
