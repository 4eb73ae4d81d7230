"""Comparison of the processes of a run before the first step.

Many processes train one model only if all run the same program on the same data: another learning rate, seed, data file
or line of code in one of them silently gives a useless checkpoint. So each process collects facts about itself, process
0 compares them, and all end with one sentence that names the processes and their differences. The facts travel over the
connections of the watchdog: a collective would need the very agreement that is still to be checked.

    config     every field, except those that only process 0 or only this process uses (`PER_PROCESS`)
    data       digests of the datasets and of the tokenizer, wherever each process has them
    software   a hash of each of mjax's source files, versions of packages, settings of JAX and XLA
    folder     a token that process 0 writes into the run folder, and the newest checkpoint there
"""

import dataclasses
import json
import os
import re
import secrets
import socket
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mjax.checkpoint.folders import MANIFEST, checkpoint_steps
from mjax.checkpoint.mirror import read_folder
from mjax.cluster.watchdog import Watchdog
from mjax.config import Config
from mjax.config.datasets import parse_blend
from mjax.config.marks import BLEND, PER_PROCESS, field_marks
from mjax.data.indexed import digest_folder
from mjax.data.sources import TrainingData
from mjax.errors import UsageError, shorten_list
from mjax.run.continuing import Origin, compute_digests
from mjax.utils.packages import list_versions, source_hashes

PACKAGES = re.compile(
    r"(jax|nvidia).*|flax|optax|orbax-checkpoint|tensorstore|ml-dtypes|numpy|sentencepiece|tokenizers"
)
JAX_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
)  # fmt: skip
VISIBILITY_TIMEOUT = 15.0  # seconds until a file is visible on all hosts that share a folder
MAX_SHOWN = 6  # differences, and processes in a group

Facts = dict[str, tuple[str, str]]  # by name: the value compared, and the value shown


def check_agreement(watchdog: Watchdog, facts: Facts) -> None:
    """Compare the facts of all processes.

    Raises:
      UsageError: there are differences; in every process.
    """
    if error := watchdog.decide_on_first({"host": socket.gethostname(), "facts": facts}, describe_differences):
        raise UsageError(error)


def collect_facts(config: Config, data: TrainingData | None = None, origin: Origin | None = None) -> Facts:
    """The facts that have to be the same in every process.

    Args:
      config: of the run, with `model.attention` resolved to a kernel.
      data: as opened; None: not given by the config.
      origin: of a new run that starts from the weights of another.
    """
    facts = {**config_facts(config), **(data_facts(config, data) if data else {}), **software_facts()}
    if origin is not None:
        checkpoint = checkpoint_label(read_folder(origin.run), origin.step)
        facts["--init"] = checkpoint, f"{origin.run}, checkpoint {checkpoint}"
    return facts


def describe_differences(processes: Sequence[dict[str, Any]]) -> str:
    """Return the sentence that names the processes that differ, and their facts; empty if all are the same.

    Args:
      processes: 'host' and 'facts' of each, in order.
    """
    hosts, differences = [process["host"] for process in processes], []
    for name in dict.fromkeys(name for process in processes for name in process["facts"]):
        groups, texts = defaultdict(list), {}
        for index, process in enumerate(processes):
            value, text = process["facts"].get(name, ("", "absent"))
            groups[value].append(index)
            texts[value] = text
        if len(groups) == 1:
            continue
        # Smallest groups first: processes in small groups are named, the largest group is "the others".
        *small, (usual, majority) = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
        parts = [f"{texts[value]} on {_format_processes(indices, hosts)}" for value, indices in small]
        rest = "the others" if len(majority) > len(small[-1][1]) else _format_processes(majority, hosts)
        differences.append(f"{name} {', '.join(parts)}, {texts[usual]} on {rest}")
    if not differences:
        return ""
    shown = "; ".join(shorten_list(differences, MAX_SHOWN, "more differences"))
    return f"the processes of this run do not agree: {shown}; start all with the same flags, files and software"


def _format_processes(indices: Sequence[int], hosts: Sequence[str]) -> str:
    """`process 2 on node7`, `processes 2 on node7 and 5 on node9`, …"""
    named = shorten_list([f"{index} on {hosts[index]}" for index in indices], MAX_SHOWN)
    return f"process{'es' * (len(indices) > 1)} {' and '.join(named)}"


# --- Facts ------------------------------------------------------------------------------------------------------------


def config_facts(config: Config) -> Facts:
    """Every field except those marked `PER_PROCESS` and the paths of data."""
    facts = {}
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            name, value = f"{section.name}.{field.name}", getattr(values, field.name)
            if field_marks(config, name).isdisjoint({PER_PROCESS, BLEND}):
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                facts["--" + name.replace("_", "-")] = json.dumps(value), shown
    return facts


def data_facts(config: Config, data: TrainingData) -> Facts:
    """Digests of the data: a process may have its copy elsewhere, such as on a local disk."""
    facts = {}
    if data.tokenizer is not None:
        digest = digest_folder(data.tokenizer)
        facts["tokenizer"] = digest, f"{data.tokenizer} ({digest[:8]})"
    for field, digests in compute_digests(config.data).items():
        values = getattr(config.data, field)
        shown = " ".join(values) + f" (tokens {'+'.join(digest[:8] for digest in digests)})"
        facts[f"--data.{field.replace('_', '-')}"] = json.dumps([parse_blend(values).weights, digests]), shown
    return facts


def software_facts() -> Facts:
    """mjax's source files, its dependencies, and the settings that affect the computation."""
    facts = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    facts |= dependency_versions()
    facts |= {name: str(getattr(jax.config, name, None)) for name in JAX_SETTINGS}  # a version may lack one
    # Each process may write its dumps where it likes.
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump")]
    facts["XLA_FLAGS"] = " ".join(sorted(flags)) or "none"
    facts |= source_hashes()
    return {name: (value, value) for name, value in facts.items()}


def dependency_versions() -> dict[str, str]:
    """Versions of the packages that affect the computation, from package metadata.

    A library of NVIDIA that LD_LIBRARY_PATH puts first is not included.
    """
    return {name: version for name, version in sorted(list_versions().items()) if PACKAGES.fullmatch(name)}


# --- The run folder ---------------------------------------------------------------------------------------------------


def check_shared(watchdog: Watchdog, folder: Path) -> None:
    """Check that all processes have the same run folder, with the same checkpoints.

    Raises:
      UsageError: they do not; in every process.
      OSError: this one, as process 0, cannot write there.
    """

    def create_token(_) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f".shared-{secrets.token_hex(8)}"
        file.touch()
        return file.name

    token = folder / watchdog.decide_on_first(None, create_token)
    facts = {"the newest checkpoint is": (checkpoint_label(folder),) * 2}
    about = {"host": socket.gethostname(), "folder": str(folder), "shared": _is_visible(token), "facts": facts}
    try:
        error = watchdog.decide_on_first(about, _describe_unshared)
    finally:
        if watchdog.index == 0:
            token.unlink(missing_ok=True)
    if error:
        raise UsageError(error)


def _is_visible(file: Path) -> bool:
    """True if `file` exists, or appears soon: a network file system may cache a folder for a while."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not file.exists() and time.monotonic() < deadline:
        for folder in (file.parent.parent, file.parent):  # listing it makes the system refresh its cache
            if folder.is_dir():
                os.listdir(folder)
        time.sleep(0.2)
    return file.exists()


def checkpoint_label(folder: Path, step: int | None = None) -> str:
    """The step of a checkpoint, by default the newest, with a checksum of its manifest; 'none' without one."""
    if step is None and (step := max(checkpoint_steps(folder), default=None)) is None:
        return "none"
    manifest = folder / "checkpoints" / str(step) / MANIFEST
    return f"{step} ({zlib.crc32(manifest.read_bytes()):08x})" if manifest.is_file() else str(step)


def _describe_unshared(processes: Sequence[dict[str, Any]]) -> str:
    unable = [index for index, process in enumerate(processes) if not process["shared"]]
    if not unable:
        return describe_differences(processes)
    hosts, folder = [process["host"] for process in processes], processes[0]["folder"]
    missing = f"{_format_processes(unable, hosts)} cannot see it at {processes[unable[0]]['folder']}"
    advice = "use --runs with a folder on a file system that all share"
    return f"process 0 on {hosts[0]} has its run folder at {folder}, and {missing}; {advice}"
