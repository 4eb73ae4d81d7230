"""The manifest of a checkpoint: what was written, so that damage is seen before it becomes other weights.

manifest.json lists every array's type and shape and every file's size and CRC-32, and carries a checksum of itself.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
READ_BYTES = 1 << 24


class Damaged(Exception):
    """What is wrong with a checkpoint, as half a sentence."""


def write_manifest(folder: Path, kinds: dict[str, list]) -> int:
    """Describe what Orbax wrote, as read back from the files. Returns their bytes."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    with ThreadPoolExecutor() as readers:
        checksums = readers.map(_checksum, files)
        described = {
            file.relative_to(folder).as_posix(): [file.stat().st_size, checksum]
            for file, checksum in zip(files, checksums, strict=True)
        }
    content = {"arrays": kinds, "files": described}
    (folder / MANIFEST).write_text(json.dumps({"checksum": _checksum_json(content), **content}, indent=1))
    return sum(size for size, _ in described.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: 'arrays' {name: [type, shape]} and 'files' {path: [bytes, CRC-32]}.

    Raises:
      Damaged: it is missing or is not what was written.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        checksum = manifest.pop("checksum")
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing, so it was never finished or not copied whole") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, AttributeError, TypeError):  # not JSON any more, or not the object that was written
        checksum, manifest = None, None
    if checksum != _checksum_json(manifest):
        raise Damaged(f"{MANIFEST} is not what was written")
    return manifest


def check_files(folder: Path, files: dict[str, list], field: str | None) -> None:
    """Compare size and checksum of each file, or of those that `field` needs, with the manifest's.

    Raises:
      Damaged: one is missing, of another size, or of another content.
    """
    needed = {
        name: said for name, said in files.items() if field is None or name.split("/")[0] == field or "/" not in name
    }
    try:
        for name, (size, _) in needed.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise Damaged(f"{name} has {found} bytes of {size}")
        with ThreadPoolExecutor() as readers:
            checksums = readers.map(_checksum, [folder / name for name in needed])
            for (name, (_, checksum)), found in zip(needed.items(), checksums, strict=True):
                if found != checksum:
                    raise Damaged(f"{name} is not what was written (checksum)")
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).relative_to(folder)} is missing") from error
    except OSError as error:
        raise Damaged(
            f"{Path(error.filename or folder).relative_to(folder)} cannot be read: {reason(error)}"
        ) from error


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _checksum_json(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def reason(error: BaseException) -> str:
    """The system's words for a failure; tensorstore hides the error number in its text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else (str(error).splitlines() or [type(error).__name__])[0]
