"""Kills `mjax dedup` or `mjax clean` before each thing it does to its output folder, and runs it again.

    python -m tests.data.kill_cleaning dedup|clean FOLDER [--overwrite]

As kill_points.py does with datasets: after each death the output must not be there, or be whole; then the same command
runs undisturbed and must leave the files of a clean run, byte for byte. Prints the number of points.
"""

import shutil
import sys
from pathlib import Path

from mjax.commands.clean import CleanArguments, clean
from mjax.commands.dedup import DedupArguments, dedup
from mjax.data.shingles import word_hashes
from tests.data.kill_points import contents, deaths, in_a_copy


def main() -> None:
    kind, place, overwrite = sys.argv[1], Path(sys.argv[2]), "--overwrite" in sys.argv
    folder, start, file = place / "out", place / "start", place / "in.jsonl"
    start.mkdir(parents=True)
    text = "It was a bright cold day in April and the clocks were striking thirteen"
    file.write_text("".join(f'{{"text": "{text}{end}"}}\n' for end in ("", "!", " donâ€™t", "")))
    if overwrite:
        (start / "out.jsonl").write_text("an older output\n")

    def command() -> None:
        arguments = {"inputs": (file,), "output": folder / "out.jsonl", "overwrite": overwrite, "workers": 1}
        if kind == "dedup":
            dedup(DedupArguments(**arguments, threshold=1))  # one band: few files
        else:
            clean(CleanArguments(**arguments, minimum_tokens=15))

    word_hashes("what is computed once is computed here, for all copies")
    shutil.copytree(start, folder)
    assert in_a_copy(command, folder, None) == 0
    old, whole = contents(start), contents(folder)
    assert len(whole) == 3

    point = 0
    for point in deaths(command, folder, start):
        left = contents(folder)
        if "out.jsonl" in left:
            assert left["out.jsonl"] in (old.get("out.jsonl"), whole["out.jsonl"]), point
        if left.get("out.jsonl") == whole["out.jsonl"] and not overwrite:
            assert left.items() >= whole.items(), point
            assert in_a_copy(command, folder, None) == 2, "a whole output is not written again"
            shutil.rmtree(folder / "out.jsonl.tmp", ignore_errors=True)
        else:
            assert in_a_copy(command, folder, None) == 0, point
        assert contents(folder) == whole, (point, sorted(contents(folder)))
    print(point)


if __name__ == "__main__":
    main()
