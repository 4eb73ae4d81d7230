"""Predicted bytes per device compared with XLA's allocation, for GPUs that this machine does not have.

    python benchmarks/memory.py                                            # all configs of the table: an hour
    python benchmarks/memory.py --only 345m                                # those with 345m in their name: minutes
    python benchmarks/memory.py --write tests/planner/compiled_memory.json # save the table

Needs the CUDA wheels (requirements-cuda.txt) and no GPU: the train step of each config is compiled ahead of time for
its own mesh of H100s. Bytes per device are arguments + outputs - aliased + temporaries. The configs come from
tests/planner/compiled_memory.json; the exit code is 1 if a prediction is off by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import check_output, in_one_sentence
from mjax.cluster import launch
from mjax.cluster.hardware import gpu_named
from mjax.config import Config, from_dict, load_config, to_dict
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.planner.command import check_compile, compile_step, compiler_versions
from mjax.planner.memory import KINDS, predict_memory
from mjax.utils.figures import GIB

TABLE = Path(__file__).resolve().parent.parent / "tests" / "planner" / "compiled_memory.json"
TOLERANCE = 0.05


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="compile the configs whose name has this in it (default: all)")
    parser.add_argument("--write", type=Path, help="write what was compiled into this file")
    arguments = parser.parse_args()
    if arguments.write is not None:
        check_output("--write", arguments.write)
        if arguments.only:
            raise UsageError("--write keeps the whole table, of one date and one compiler; leave --only out")
    launch.hide_accelerators()  # nothing runs: the GPUs are described, not opened
    table = json.loads(TABLE.read_text())
    rows = [row for row in table["rows"] if arguments.only in row["name"]]
    if not rows:
        raise UsageError(f"--only {arguments.only}: no row of {TABLE.name} has that in its name")
    check_compile(config_of(rows[0]), gpu_named("h100"))
    versions = compiler_versions()

    print("| config | devices | compiled GiB | predicted GiB | ratio | " + " | ".join(KINDS) + " | s |")
    print("| --- |" + " ---: |" * (5 + len(KINDS)))
    failed = False
    for row in rows:
        config, start = config_of(row), time.perf_counter()
        row |= compiled(config)
        memory = predict_memory(config)
        ratio = memory.total / row["total"]
        failed |= abs(ratio - 1) > TOLERANCE
        kinds = " | ".join(f"{size / GIB:.2f}" for size in memory.parts.values())
        print(
            f"| {row['name']} | {config.mesh.devices} | {row['total'] / GIB:.2f} | {memory.total / GIB:.2f} "
            f"| {ratio:.3f} | {kinds} | {time.perf_counter() - start:.0f} |",
            flush=True,
        )
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"\n{named}; {len(os.sched_getaffinity(0))} CPU cores")
    if arguments.write is not None:
        for row in rows:
            row.pop("date", None)  # of a row that was added later
        kept = {**table, "date": f"{date.today()}", "versions": versions, "rows": rows}
        arguments.write.write_text(json.dumps(kept, indent=1) + "\n")
    if failed:
        print(f"a prediction is off by more than {TOLERANCE:.0%}", file=sys.stderr)
    return int(failed)


def config_of(row: dict) -> Config:
    """The config of a row: a published one with some fields changed, and the batch of its last steps."""
    values = to_dict(load_config(row["config"]))
    values["data"]["mock"] = True
    values["train"] |= {"batch_rampup": None, "unroll": "off"}
    for flag, value in row["flags"].items():
        section, knob = flag.split(".")
        values[section][knob] = value
    config = from_dict(values)
    validate(config, row["name"])
    return config


def compiled(config: Config) -> dict[str, int]:
    """Bytes per device that XLA allocates for the train step of `config`, and bytes of host memory if there are any."""
    memory = compile_step(config, "h100").memory
    found = {"argument": memory.arguments, "temporary": memory.temporaries, "total": memory.total}
    return found | ({"host": memory.host} if memory.host else {})


if __name__ == "__main__":
    sys.exit(main())
