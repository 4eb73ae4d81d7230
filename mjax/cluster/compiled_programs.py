"""Compiled programs, kept on the disk so that a restart need not compile them again (JAX's persistent cache)."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mjax.cluster.launch import launched_by, set_variable
from mjax.utils.files import cache_home

FOLDER, MOST_BYTES = "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"
MOST = 2 * 2**30  # bytes; JAX removes the programs that were used least recently


def folder() -> Path | None:
    """The folder of this machine's programs; None without a home.

    Machines with other processors that share the home have folders of their own: XLA would run programs for a CPU with
    instructions that this one lacks.
    """
    home = cache_home()
    try:
        processor = re.search(r"^(flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        processor = None
    kind = hashlib.sha256((processor[0] if processor else platform.processor()).encode()).hexdigest()[:8]
    return None if home is None else home / "programs" / f"{platform.machine()}-{kind}"


def problem_with(place: Path) -> str | None:
    """Why nothing can be kept in `place`, which is created; None if it can.

    What is kept is machine code that runs when it is loaded, so no one else may write there.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.stat()
        if found.st_mode & 0o022 or found.st_uid not in (0, os.getuid()):
            return f"others can write into {place}, and programs there are run (chmod go-w {place}, if it is yours)"
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"1")
    except OSError as error:
        return f"{place} cannot be written ({error.strerror or error})"
    return None


def keep_programs(several: bool | None = None, say: Callable[[str], None] | None = None) -> None:
    """Let JAX keep compiled programs; before it compiles the first one.

    Nothing changes if the user has chosen a folder, or none, with JAX_COMPILATION_CACHE_DIR; and with several
    processes: on GPUs they measure kernels together while they compile, and one that does not compile would leave the
    others waiting.

    Args:
      several: whether this process is one of several; by default what a launcher says.
      say: takes one sentence if nothing can be kept; by default it goes to stderr.
    """
    say = say or (lambda line: print(line, file=sys.stderr))
    several = launched_by() is not None if several is None else several
    jax = sys.modules.get("jax")  # a config file may import it; nothing is compiled yet
    if several or FOLDER in os.environ or (jax is not None and jax.config.jax_compilation_cache_dir):
        return
    place = folder()
    problem = "there is no home folder" if place is None else problem_with(place)
    if problem is not None:
        say(f"{problem}: programs are compiled at every start; name another folder with {FOLDER}")
        return
    set_variable(FOLDER, str(place))
    if MOST_BYTES not in os.environ:
        set_variable(MOST_BYTES, str(MOST))
    if jax is not None:
        jax.config.update("jax_compilation_cache_dir", os.environ[FOLDER])
        jax.config.update("jax_compilation_cache_max_size", int(os.environ[MOST_BYTES]))
