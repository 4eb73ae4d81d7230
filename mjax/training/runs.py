"""Run folders: where a run lives, and whether a config continues the one that is there."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from mjax.config import Config, differences, read_config
from mjax.errors import UsageError

# What the weights' shapes and meaning depend on; the rest may change between two starts of a run.
FIXED = (
    "kind", "layers", "hidden", "heads", "feed_forward", "sequence", "positions", "vocabulary", "vocabulary_multiple",
    "activation", "mlm_activation", "layernorm", "embedding_layernorm", "head", "answers",
)  # fmt: skip


def has_checkpoint(folder: Path) -> bool:
    """Whether `folder` holds a run that can be continued."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(entry.name.isdigit() for entry in checkpoints.iterdir())


def changes_since(folder: Path, config: Config) -> list[str]:
    """What `config` changes in the run that `folder` holds, one line each; nothing where it holds none.

    Raises:
      UsageError: the run there is of another model.
    """
    if not has_checkpoint(folder):
        return []
    before = read_config(folder / "config.json")
    changed = differences(before, config)
    for field in FIXED:
        if f"model.{field}" in changed:
            old, new = changed[f"model.{field}"]
            raise UsageError(
                f"{folder} holds a run of another model (model.{field} {old}, now {new}); "
                "choose another --name, or leave the model as it was"
            )
    lines = [f"changed {name}: {old} → {new}" for name, (old, new) in changed.items()]
    if before.training_samples != config.training_samples and not config.data.mock:
        lines.append(
            "note: Megatron's order of samples depends on their number, so it differs from the one before; "
            f"--data.samples {before.training_samples} keeps it where that many are enough"
        )
    return lines


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process; the system lets go of it when the process ends, however it ends.

    Raises:
      UsageError: another process trains here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder} is in use by another process; wait for it, or choose another folder") from None
        yield
