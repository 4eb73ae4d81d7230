"""Memory of `mjax convert`: a layer of one weight, not the model."""

import os
import re
import threading
from pathlib import Path

import pytest

from mjax.checkpoint import arrays
from mjax.commands import cli
from tests.interop.folders import LLAMA, read_folder, tensors_of, write_folder
from tests.interop.whole_weights import assert_same

# Its embedding is read in several parts. The last part has the first rows of padding.
LARGE = {**LLAMA, "num_hidden_layers": 28, "hidden_size": 256, "intermediate_size": 896, "head_dim": 64}
LARGE |= {"vocab_size": 8201}


def peak_of(argv):
    """Return the peak of anonymous memory of a command, in bytes."""
    held, done = [], threading.Event()

    def watch():
        while not done.is_set():
            status = Path("/proc/self/status").read_text()
            held.append(1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1]))
            done.wait(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert cli.main(argv) == 0
    finally:
        done.set()
        watcher.join()
    return max(held) - held[0]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="anonymous memory is read from /proc")
def test_conversions_hold_less_than_half_the_model(tmp_path, monkeypatch):
    """Folders may be relative and have any name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1 << 20)
    small = write_folder(Path("small"), LLAMA, tensors_of(LLAMA))
    tensors = tensors_of(LARGE)
    source = write_folder(Path("in #1 %20?"), LARGE, tensors, parts=3)
    size = sum(each.nbytes for each in tensors.values())
    assert size > 100e6
    del tensors
    for name, folder in {"first": small, "run #1 %20": source}.items():  # the first pays for one-time loads
        taken = [
            peak_of(["convert", "from-hf", str(folder), name]),
            peak_of(["convert", "to-hf", name, f"out {name}", "--shard-size", "20MB"]),
        ]
    assert max(taken) < size / 2, [f"{each / 1e6:.0f} MB" for each in taken]
    assert_same(read_folder(Path("out run #1 %20")), read_folder(source))
