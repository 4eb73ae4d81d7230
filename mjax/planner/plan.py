"""`mjax plan`: what the pipeline of a config will do, as numbers and as a picture, without touching a device."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from mjax.config import Config
from mjax.errors import UsageError
from mjax.parallel.schedules import schedule_of, slot_times
from mjax.validation import validate


@dataclass(frozen=True)
class PlanArguments:
    """Show the pipeline schedule of a config. Any field of the config can be changed by a flag: --mesh.pipe 4."""

    config: str = "gpt_demo"
    """Name of a file in configs/, or a path to a .py file that defines `config`."""
    schedule_figure: Path | None = None
    """Draw the schedule into this file: .png, .pdf or .svg."""
    json: bool = False
    """Print one JSON object instead of a table."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def run_plan(arguments: PlanArguments) -> int:
    """Print the plan of a checked config; returns the exit code.

    Raises:
      UsageError: the config cannot run or has no pipeline, or the picture cannot be written where it should go.
    """
    config, file = arguments.settings, arguments.schedule_figure
    # A plan needs no data.
    validate(replace(config, data=replace(config.data, mock=True)), arguments.config)
    if config.mesh.pipe == 1:
        layers = config.model.layers
        stages = next((count for count in range(2, layers) if layers % count == 0), layers)
        raise UsageError(f"{arguments.config} has no pipeline; give it stages, such as --mesh.pipe {stages}")
    if file is not None:
        _check_file(file)

    from mjax.planner.schedule_figure import describe_bubble, describe_in_flight, display_name, draw_schedule

    schedule, times = schedule_of(config), slot_times(config)
    if file is not None:
        draw_schedule(schedule, file, *times)
    if arguments.json:
        forward, backward, weight = times
        plan = {
            "schedule": schedule.name,
            "stages": schedule.stages,
            "micro_batches": schedule.micro_batches,
            "chunks": schedule.chunks,
            "ticks": schedule.ticks,
            "slot_times": {"forward": forward, "backward": backward, "weight": weight},
            "bubble": schedule.bubble(*times),
            "in_flight": [schedule.in_flight(stage) for stage in range(schedule.stages)],
            "schedule_figure": None if file is None else str(file),
        }
        print(json.dumps(plan))
        return 0
    rows = {
        "schedule": display_name(schedule),
        "stages, P": schedule.stages,
        "micro-batches, M": schedule.micro_batches,
        "chunks a stage, V": schedule.chunks,
        "ticks": schedule.ticks,
        "bubble": describe_bubble(schedule, *times),
        "in flight": describe_in_flight(schedule),
    }
    if file is not None:
        rows["picture"] = file
    for name, value in rows.items():
        print(f"{name:<18} {value}")
    return 0


def _check_file(file: Path) -> None:
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--schedule-figure {file} is no picture; let its name end in .png, .pdf or .svg")
    if not file.parent.is_dir():
        raise UsageError(f"--schedule-figure {file}: there is no folder {file.parent}; make it, or name another file")
