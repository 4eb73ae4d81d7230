"""The train step compiled for GPUs that are not there: what hides its collectives, its kernels and their modelled time.

    python benchmarks/aot/step.py --config gpt_8b --gpu h100                              # any field of the config
    python benchmarks/aot/step.py --config gpt_8b --gpu h100 --save-program step.mjax     # to compile it on a cluster

Needs the CUDA wheels (requirements-cuda.txt) and no GPU. `mjax plan --compile` prints memory, and collectives next to
the predicted ones. Times are a model of the compiled program (roofline.py), not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.aot.roofline import Roofline, roofline
from benchmarks.aot.saved_program import check_save, save_program
from benchmarks.aot.schedule import Overlapped, read_launches, read_overlaps
from benchmarks.command import in_one_sentence
from mjax.cluster import launch
from mjax.cluster.hardware import gpu_named
from mjax.commands.flags import flag_names, parse
from mjax.commands.train import choose_config
from mjax.config import Config
from mjax.config.bounds import Count
from mjax.config.checks import resolve, validate
from mjax.planner.command import check_compile, compile_step, compiler_versions
from mjax.utils.figures import format_table, human_bytes


@dataclass(frozen=True)
class Arguments:
    """Compile the train step of a config for absent GPUs. Any config field is a flag."""

    config: str = "gpt_demo"
    """Config name in configs/, or path to a .py file that defines `config`."""
    gpu: str = "h100"
    """GPU to compile for: a100, b200, h100 or h200."""
    devices_per_node: Count = 8
    """GPUs per server."""
    save_program: Path | None = None
    """Write the step into this file."""
    json: bool = False
    """Print one JSON object instead of tables."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@in_one_sentence
def main() -> int:
    argv = sys.argv[1:]
    chosen = choose_config(argv).settings
    arguments = parse(Arguments, argv, "step.py", Arguments(settings=chosen))
    config, _ = resolve(arguments.settings, chosen, flag_names(argv), arguments.config, Path("runs"))
    config = replace(config, data=replace(config.data, mock=True))
    validate(config, arguments.config)
    gpu, devices, compute = gpu_named(arguments.gpu), config.mesh.devices, config.precision.compute
    check_compile(config, gpu.with_server(arguments.devices_per_node))
    if arguments.save_program is not None:
        check_save(arguments.save_program)
    launch.hide_accelerators()  # nothing runs: the GPUs are described, not opened
    from mjax.config import axes
    from mjax.planner.layer import model_flops

    compiled = compile_step(config, arguments.gpu, arguments.devices_per_node, quiet=False)
    if arguments.save_program is not None:
        facts = {"gpu": arguments.gpu, "device_kind": compiled.device_kind}
        facts |= {
            "attention": compiled.config.model.attention,
            "memory": asdict(compiled.memory),
            "versions": compiler_versions(),
        }
        save_program(arguments.save_program, compiled.config, compiled.step, "cuda", facts, compiled.text)
    overlaps = overlap_rows(read_overlaps(compiled.text, axes.sizes(config.mesh)))
    launches, modelled = read_launches(compiled.text), roofline(compiled.text, gpu, devices, compute)
    mfu = modelled.mfu(model_flops(config) / devices, gpu, compute)
    if arguments.json:
        values = {"seconds": modelled.seconds, "mfu": mfu, "collectives": overlaps, "kernels": launches}
        print(json.dumps(values | {"roofline": asdict(modelled)}))
        return 0
    print("\n\n".join("\n".join(part) for part in (overlap_table(overlaps), kernels(launches), times(modelled, mfu))))
    return 0


def overlap_rows(collectives: Iterable[Overlapped]) -> list[dict]:
    """Rows by (axes, operation, dtype): calls and bytes per step, and the bytes that overlap matmuls, other kernels
    only, or nothing."""
    rows: dict[tuple, dict] = {}
    for c in sorted(collectives, key=lambda c: c.key):
        empty = dict.fromkeys(("calls", "bytes", "products", "kernels", "nothing"), 0)
        row = rows.setdefault(c.key, {"axes": c.axes, "kind": c.operation, "dtype": c.dtype, **empty})
        row["calls"] += c.calls
        row["bytes"] += c.count * c.bytes
        row[c.overlap] += c.count * c.bytes
    return list(rows.values())


def overlap_table(rows: list[dict]) -> list[str]:
    from mjax.planner.ledger import axes_name

    header = ("collectives", "over", "dtype", "calls", "put in", "beside products", "other kernels", "nothing")
    cells = []
    for row in rows:
        shares = [f"{row[what] / row['bytes']:.0%}" for what in ("products", "kernels", "nothing")]
        about = row["kind"], axes_name(row["axes"]), row["dtype"]
        cells.append([*about, f"{row['calls']:,}", human_bytes(row["bytes"]), *shares])
    return format_table(header, cells, left=3) if rows else ["collectives: none, on a mesh of one device"]


def kernels(launches: dict[str, dict[str, int]]) -> list[str]:
    most = sorted(launches.items(), key=lambda kernel: -kernel[1]["launches"])
    rows = [(kernel, counts["different"], f"{counts['launches']:,}") for kernel, counts in most]
    return format_table(("kernels", "different", "launches a step"), rows)


def times(modelled: Roofline, mfu: float) -> list[str]:
    """The modelled time of the compiled kernels, by kind."""
    cells = [
        (kind, f"{row.kernels:,}", f"{row.bytes / 1e9:.1f}", f"{1e3 * row.seconds:.1f}",
         f"{row.seconds / modelled.seconds:.1%}")
        for kind, row in sorted(modelled.rows.items(), key=lambda each: -each[1].seconds)
    ]  # fmt: skip
    lines = format_table(("roofline of these kernels", "launches", "GB", "ms", "share"), cells)
    return [*lines, f"In all {1e3 * modelled.seconds:.1f} ms a step, {mfu:.1%} MFU: a model, not measured."]


if __name__ == "__main__":
    sys.exit(main())
