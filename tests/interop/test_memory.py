"""What `mjax convert` holds in memory: a layer of one weight, not the model."""

import os
import re
import threading
from pathlib import Path

import pytest

from mjax import cli
from mjax.state import arrays, blocks
from tests.interop.folders import LLAMA, read_folder, tensors_of, write_folder
from tests.interop.whole_weights import assert_same

# Its embedding is read in several parts, the last of which has the first rows of padding.
LARGE = {**LLAMA, "num_hidden_layers": 28, "hidden_size": 256, "intermediate_size": 896, "head_dim": 64}
LARGE |= {"vocab_size": 8201}


def peak_of(argv):
    """How much anonymous memory a command takes at most, in bytes."""
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
    for module in (arrays, blocks):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 20)
    small = write_folder(tmp_path / "small", LLAMA, tensors_of(LLAMA))
    tensors = tensors_of(LARGE)
    source, size = write_folder(tmp_path / "in", LARGE, tensors, parts=3), sum(each.nbytes for each in tensors.values())
    assert size > 100e6
    del tensors
    for name, folder in {"compiled": small, "run": source}.items():  # the first pays for what is loaded once
        taken = [
            peak_of(["convert", "from-hf", str(folder), str(tmp_path / name)]),
            peak_of(["convert", "to-hf", str(tmp_path / name), str(tmp_path / f"out {name}"), "--shard-size", "20MB"]),
        ]
    assert max(taken) < size / 2, [f"{each / 1e6:.0f} MB" for each in taken]
    assert_same(read_folder(tmp_path / "out run"), read_folder(source))


def test_folder_names_may_be_relative_and_odd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_folder(Path("in #1 %20?"), LLAMA, tensors_of(LLAMA))
    assert cli.main(["convert", "from-hf", str(source), "run #1 %20?"]) == 0
    assert cli.main(["convert", "to-hf", "run #1 %20?", "out"]) == 0
    assert_same(read_folder(Path("out")), read_folder(source))
