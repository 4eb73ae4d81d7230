"""`mjax plan`: what a run of a config will do, said before it starts and without touching a device.

A plan is a list of sections in a fixed order. Each is made by a function of the arguments, which gives None where the
config has nothing of it (no schedule without a pipeline) or where it was not asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from mjax.bounds import Count, Positive
from mjax.commands.train import TrainArguments, choose_config, name_of
from mjax.config import Config
from mjax.errors import UsageError, check_picture
from mjax.flags import parse, typed_flags
from mjax.hardware import Gpu, gpu_named
from mjax.models.kernels import attention_on_gpu
from mjax.planner.calibration import Calibration, default_calibration, read_calibration
from mjax.planner.config_file import write_config
from mjax.planner.rates import Rates
from mjax.planner.search_flags import SearchArguments, check_search
from mjax.planner.section import Section, named_rows
from mjax.resolve import resolve
from mjax.validation import validate


@dataclass(frozen=True)
class PlanArguments:
    """Show what a run of a config will do. Any field of the config can be changed by a flag: --mesh.pipe 4."""

    config: str = "gpt_demo"
    """Name of a file in configs/, or a path to a .py file that defines `config`."""
    run: Annotated[Path | None, tyro.conf.arg(aliases=["--resume"])] = None
    """In place of a config: that of the run in this folder."""
    schedule_figure: Path | None = None
    """Draw the pipeline's schedule into this file: .png, .pdf or .svg."""
    memory_figure: Path | None = None
    """Draw bytes by kind, with every kind of recomputation, into this file: .png, .pdf or .svg."""
    communication_figure: Path | None = None
    """Draw what a device sends, by axis and source, into this file: .png, .pdf or .svg."""
    gpu: str | None = None
    """The GPU to plan for, such as h100: adds whether it fits and how long a step takes.
    mjax/hardware.py has all names."""
    calibration: Path | None = None
    """Rates measured on your machine, from benchmarks/calibrate.py; those of published runs when not given."""
    compile: bool = False
    """Compile the step ahead of time for --gpu, which need not be here: memory as XLA allocates it, collectives as it
    schedules them. Takes from half a minute to some minutes, and JAX's CUDA wheels (requirements-cuda.txt)."""
    devices_per_node: Count | None = None
    """GPUs of a server, for the search, for times and for --compile; as the GPU comes when not given, mostly 8."""
    network: Positive | None = None
    """Gigabits a second, one way, of all network cards of a server together, such as 1600 for four of 400; as the GPU
    comes when not given, in proportion to --devices-per-node."""
    save_program: Path | None = None
    """With --compile: write the step into this file, for a cluster to compile and for people to read."""
    search: Annotated[SearchArguments, tyro.conf.arg(name="")] = field(default_factory=SearchArguments)
    searched: Annotated[Section | None, tyro.conf.Suppress] = None
    """What the search found; no flag."""
    json: bool = False
    """Print one JSON object instead of tables."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def plan(argv: Sequence[str]) -> int:
    """`mjax plan`; returns the exit code."""
    chosen = choose_config(argv)
    config = chosen.config if chosen.resume is None else str(chosen.resume)
    default = PlanArguments(config=config, run=chosen.resume, settings=chosen.settings)
    arguments = parse(PlanArguments, argv, "mjax plan", default)
    if chosen.resume is None:
        folder = TrainArguments.runs / name_of(config)
        settings, taken = resolve(arguments.settings, chosen.settings, typed_flags(argv), config, folder)
        arguments = replace(arguments, settings=settings)
        for line in taken:
            print(line, file=sys.stderr)
    return run_plan(arguments)


def run_plan(arguments: PlanArguments) -> int:
    """Print the plan of a checked config; returns the exit code.

    Raises:
      UsageError: the config cannot run, a picture is of something that it does not have, or it cannot be written where
        it should go.
    """
    for name in ("schedule_figure", "memory_figure", "communication_figure"):
        if (file := getattr(arguments, name)) is not None:
            check_picture(f"--{name.replace('_', '-')}", file)
    check_search(arguments.search, arguments.gpu)
    if arguments.save_program is not None and not arguments.compile:
        raise UsageError("--save-program writes what --compile compiles; add --compile --gpu h100")
    _check_server(arguments)
    if arguments.gpu is not None:
        arguments = replace(arguments, gpu=gpu_named(arguments.gpu).name)  # it may be given as JAX calls the device
    about = ""
    if arguments.search.devices is not None:
        arguments, about = _with_the_fastest(arguments)
    config = arguments.settings
    # A plan needs no data.
    validate(replace(config, data=replace(config.data, mock=True)), arguments.config)
    if arguments.schedule_figure is not None:
        _check_pipeline(arguments)

    if arguments.compile:
        from mjax.planner.compile_section import check_arguments

        check_arguments(config, arguments.gpu, _per_server(arguments), arguments.save_program)
    _check_gpu(arguments)
    if arguments.search.write is not None:  # after all that can be refused
        write_config(config, arguments.search.write, about)

    sections = {key: build(arguments) for key, build in SECTIONS.items()}
    if arguments.json:
        print(
            json.dumps(
                {key: None if section is None else section.values for key, section in sections.items()}, allow_nan=False
            )
        )
    else:
        print("\n\n".join(section.text for section in sections.values() if section is not None))
    return 0


# --- The sections -----------------------------------------------------------------------------------------------------


def _run(arguments: PlanArguments) -> Section:
    """What is planned."""
    from mjax.models.build import count_parameters

    config = arguments.settings
    mesh, train, parameters = config.mesh, config.train, count_parameters(config.model)
    values = {
        "config": arguments.config,
        "parameters": parameters,
        "mesh": {"pipe": mesh.pipe, "data": mesh.data, "model": mesh.model},
        "devices": mesh.devices,
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "micro_batches": config.micro_batches,
    }
    rows = {
        "parameters": f"{parameters:,}",
        "devices": f"{mesh.devices:,} = pipe {mesh.pipe} × data {mesh.data} × model {mesh.model}",
        "global batch": f"{train.global_batch:,} = {mesh.data} replicas × {config.micro_batches} micro-batches "
        f"of {train.micro_batch}",
        "recomputation": train.recompute,
        "ZeRO": mesh.zero,
    }
    return Section(arguments.config, values, named_rows(rows))


def _schedule(arguments: PlanArguments) -> Section | None:
    """The pipeline's schedule, drawn where that is asked for."""
    config, file = arguments.settings, arguments.schedule_figure
    if config.mesh.pipe == 1:
        return None
    from mjax.parallel.schedules import schedule_of, slot_times
    from mjax.planner.schedule_figure import describe_bubble, describe_in_flight, display_name, draw_schedule

    schedule, times = schedule_of(config), slot_times(config)
    if file is not None:
        draw_schedule(schedule, file, *times)
    forward, backward, weight = times
    values = {
        "name": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "chunks": schedule.chunks,
        "ticks": schedule.ticks,
        "slot_times": {"forward": forward, "backward": backward, "weight": weight},
        "bubble": schedule.bubble(*times),
        "in_flight": [schedule.in_flight(stage) for stage in range(schedule.stages)],
        "figure": None if file is None else str(file),
    }
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
    return Section("Schedule", values, named_rows(rows))


def _memory(arguments: PlanArguments) -> Section:
    """Bytes on each device, by kind."""
    from mjax.planner.memory_section import memory_section

    gpu = None if arguments.gpu is None else _gpu(arguments)
    return memory_section(arguments.settings, gpu, arguments.memory_figure)


def _communication(arguments: PlanArguments) -> Section:
    """The collectives of the traced step, drawn where that is asked for."""
    from mjax.planner.comms import communication_section, ledger
    from mjax.planner.comms_figure import draw_communication

    found, file = ledger(arguments.settings), arguments.communication_figure
    if file is not None:
        draw_communication(found, file, arguments.config)
    return communication_section(found, None if file is None else str(file))


def _time(arguments: PlanArguments) -> Section | None:
    """The time of a step and of the run, for a GPU that was named."""
    if arguments.gpu is None:
        return None
    from mjax.planner.time_section import time_section

    gpu, calibration = _predictions(arguments)
    try:
        Rates(gpu, calibration, arguments.settings.precision.compute)
    except UsageError as error:  # memory and communication need no peak
        return Section(f"Time on {gpu.name}", {"gpu": gpu.name, "seconds": None, "why": str(error)}, [str(error)])
    return time_section(arguments.settings, gpu, calibration)


def _compile(arguments: PlanArguments) -> Section | None:
    """The step as XLA compiles it for a GPU, where that is asked for."""
    if not arguments.compile:
        return None
    from mjax.planner.compile_section import compile_and_tell

    return compile_and_tell(arguments.settings, arguments.gpu, _per_server(arguments), arguments.save_program)


def _with_the_fastest(arguments: PlanArguments) -> tuple[PlanArguments, str]:
    """What is planned with --devices: the fastest way to run the config on so many; and words about it."""
    from mjax.planner.search_command import run_search

    gpu, calibration = _predictions(arguments)
    Rates(gpu, calibration, arguments.settings.precision.compute)  # refuses a type of which no time can be said
    fastest, section, about = run_search(arguments.search, arguments.config, arguments.settings, gpu, calibration)
    return replace(arguments, settings=fastest, searched=section), about


# In the order in which they are printed; the keys are those of --json.
SECTIONS: dict[str, Callable[[PlanArguments], Section | None]] = {
    "run": _run,
    "schedule": _schedule,
    "memory": _memory,
    "communication": _communication,
    "time": _time,
    "search": lambda arguments: arguments.searched,
    "compile": _compile,
}


# --- What is refused --------------------------------------------------------------------------------------------------


def _check_pipeline(arguments: PlanArguments) -> None:
    config = arguments.settings
    if config.mesh.pipe == 1:
        layers = config.model.layers
        stages = next((count for count in range(2, layers) if layers % count == 0), layers)
        raise UsageError(
            f"--schedule-figure draws a pipeline and {arguments.config} has none; give it stages, such as "
            f"--mesh.pipe {stages}{' --keep mesh.pipe' if arguments.search.devices is not None else ''}"
        )


def _check_server(arguments: PlanArguments) -> None:
    for flag, value in (("--devices-per-node", arguments.devices_per_node), ("--network", arguments.network)):
        if value is not None and arguments.gpu is None:
            raise UsageError(f"{flag} {value:g} describes the server of a GPU; add --gpu, such as --gpu h100")


def _check_gpu(arguments: PlanArguments) -> None:
    """Refuse before anything is computed what the sections would refuse after it."""
    file = arguments.calibration
    if arguments.gpu is not None:
        gpu, _ = _predictions(arguments)
        attention_on_gpu(arguments.settings, gpu.compute_capability)
        return
    if file is not None:
        raise UsageError(f"--calibration {file} is for a GPU; add --gpu, such as --gpu h100")
    attention_on_gpu(arguments.settings)


def _predictions(arguments: PlanArguments) -> tuple[Gpu, Calibration]:
    """The GPU and its rates, checked."""
    file = arguments.calibration
    calibration = default_calibration() if file is None else read_calibration(file)
    return _gpu(arguments), calibration


def _gpu(arguments: PlanArguments) -> Gpu:
    """The GPU that was named, in the server that was described."""
    return gpu_named(arguments.gpu).in_server(arguments.devices_per_node, arguments.network)


def _per_server(arguments: PlanArguments) -> int:
    """GPUs of a server; 8 where no GPU is named, which is refused elsewhere."""
    return 8 if arguments.gpu is None else _gpu(arguments).gpus_per_node
