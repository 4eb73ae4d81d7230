"""`mjax plan`: predict the memory, communication and time of a run, before it starts and without a device.

A plan is a list of sections in a fixed order. A section is None if the config has no such part (no schedule without a
pipeline) or if it was not requested.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from mjax.cluster.hardware import Gpu, gpu_named
from mjax.commands.flags import flag_names, parse
from mjax.commands.train import TrainArguments, choose_config, default_name
from mjax.config import Config, axes, differing_fields, load_config, to_flag
from mjax.config.bounds import Count, Positive
from mjax.config.checks import check_type, resolve, resolve_steps, validate
from mjax.config.kernels import HOPPER, attention_on_gpu
from mjax.config.marks import RUN_SYNONYMS, UNPLANNED
from mjax.config.run import check_new, with_values, write_config
from mjax.errors import UsageError, check_options, check_picture, name_arguments
from mjax.planner import Section
from mjax.utils.figures import format_rows
from mjax.utils.files import cache_home


@dataclass(frozen=True)
class PlanArguments:
    """Predict memory, communication and time of a run. Any config field that changes them is a flag: --mesh.pipe 4."""

    config: str = "gpt_demo"
    """Config name in configs/, or path to a .py file that defines `config` (llama3_8b for a search)."""
    run: Annotated[Path | None, RUN_SYNONYMS] = None
    """Use the config of the run in this folder instead of --config."""
    schedule_figure: Path | None = None
    """Plot the pipeline schedule into this file: .png, .pdf or .svg."""
    memory_figure: Path | None = None
    """Plot memory by kind, for each recomputation mode, into this file: .png, .pdf or .svg."""
    communication_figure: Path | None = None
    """Plot the bytes that a device sends, by axis and source, into this file: .png, .pdf or .svg."""
    gpu: str | None = None
    """GPU, such as h100: predicts if the config fits and how long a step takes. mjax/cluster/hardware.py lists all."""
    calibration: Path | None = None
    """Rates measured on your machine by benchmarks/calibrate.py of mjax's repository (by default published rates)."""
    compile: bool = False
    """Compile the step for --gpu ahead of time, without the GPU: memory and collectives by XLA, next to the predicted
    ones. Takes minutes. Needs JAX's CUDA wheels (pip install 'jax[cuda13]')."""
    devices_per_node: Count | None = None
    """GPUs per server, for the search, the time and --compile (by default the GPU's usual number, mostly 8)."""
    network: Positive | None = None
    """Network bandwidth per server, one way, in Gbit/s over all its cards (by default the GPU's usual network)."""
    max_sequence_on: Count | None = None
    """Find the longest sequence that fits on this many GPUs, which share it. Needs --gpu."""
    devices: Count | None = None
    """Search the fastest way to run the config on this many GPUs: mesh, micro-batch, recomputation. Needs --gpu."""
    fix: tuple[str, ...] = ()
    """Fields that the search leaves alone: any of mesh, train.micro_batch, train.recompute, train.loss_chunks."""
    days: Positive | None = None
    """With --devices: find the largest size of --config that trains in this many days."""
    tokens_per_parameter: Positive | None = None
    """With --days: training tokens per active parameter (by default 20, which is compute-optimal by arXiv 2203.15556,
    or the optimum of --scaling)."""
    scaling: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """The scaling.json of `mjax scale`: forecasts the loss. With --days: chooses the size and tokens of lowest loss."""
    write: Path | None = None
    """Write the fastest config into this new .py file for `python train.py`."""
    without: ClassVar = UNPLANNED
    usual: ClassVar = {
        "the run": ("config", "run", "mesh.data", "mesh.model", "mesh.pipe", "mesh.zero", "train.recompute"),
        "the cluster": ("gpu", "devices-per-node", "network", "calibration"),
        "searches": ("devices", "days", "scaling", "max-sequence-on"),
        "the output": ("details", "compile", "json", "memory-figure", "communication-figure", "schedule-figure"),
    }
    examples: ClassVar = (
        "mjax plan --config llama3_8b --gpu h100                   # does it fit, how fast does it go",
        "mjax plan --config llama3_8b --gpu h100 --devices 64      # which mesh is fastest",
        "mjax plan --gpu h100 --devices 64 --days 30               # the largest model that this budget trains",
    )

    details: bool = False
    """Below the answer, list memory by kind, collectives by source, step time by part and the pipeline schedule."""
    json: bool = False
    """Print one JSON object instead of tables."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def plan(argv: Sequence[str]) -> int:
    """`mjax plan`; returns the exit code."""
    chosen = choose_config(_with_default(argv))
    config = chosen.config if chosen.run is None else str(chosen.run)
    default = PlanArguments(config=config, run=chosen.run, settings=chosen.settings)
    arguments = parse(PlanArguments, argv, "mjax plan", default)
    if chosen.run is None:
        folder = TrainArguments.runs / default_name(config)
        settings, taken = resolve(arguments.settings, chosen.settings, flag_names(argv), config, folder)
    else:
        settings, taken = resolve_steps(arguments.settings, flag_names(argv))
    for line in taken:
        print(line, file=sys.stderr)
    from mjax.planner.layer import earlier_traces

    gc.disable()  # a search makes millions of objects and no cycles to speak of: a sixth of its time
    try:
        home = cache_home()
        with nullcontext() if home is None else earlier_traces(home / "traces"):
            return run_plan(replace(arguments, settings=settings))
    finally:
        gc.enable()


def _with_default(argv: Sequence[str]) -> Sequence[str]:
    """The command line; for a search with the config that is planned by default."""
    typed = flag_names(argv)
    for flag in typed & {"train.steps", "train.tokens"} if "days" in typed else ():
        raise UsageError(f"--{flag} and --days both set the length of the run; leave one of them out")
    is_default = typed & {"devices", "max-sequence-on"} and not typed & {"config", "run"}
    return ["--config", "llama3_8b", *argv] if is_default else argv


# Flags that have no effect without another one.
NEEDS = {
    "fix": "devices 8",
    "days": "devices 8",
    "write": "devices 8",
    "tokens_per_parameter": "days 30",
    "devices": "gpu h100",
    "max_sequence_on": "gpu h100",
    "devices_per_node": "gpu h100",
    "network": "gpu h100",
    "calibration": "gpu h100",
}
PYTHON_CONFIG = "this config"  # of a caller from Python
# Keys of the sections in --json, in printing order. The first that a plan has is its answer.
KEYS = (
    "budget",
    "search",
    "longest",
    "run",
    "forecast",
    "compile",
    "schedule",
    "memory",
    "communication",
    "time",
    "dispatch",
)


@name_arguments(*(field.name for field in fields(PlanArguments)))
def plan_config(config: Config, gpu: str | None = None, **options) -> dict:
    """Return the object of `mjax plan --json`: parameters, schedule, memory, communication and, with a GPU, time.

    Args:
      config: of the run.
      gpu: such as "h100"; predicts times, and whether the config fits.
      options: other fields of `PlanArguments`, such as `calibration`.

    Raises:
      UsageError: as on the command line.
    """
    check_type(config)
    check_options("plan", options, [field.name for field in fields(PlanArguments)])
    sections = plan_sections(PlanArguments(config=PYTHON_CONFIG, settings=config, gpu=gpu, **options))
    return json.loads(_to_json(sections))


def run_plan(arguments: PlanArguments) -> int:
    """Print the plan of a config; returns the exit code."""
    sections = plan_sections(arguments)
    if arguments.json:
        print(_to_json(sections, allow_nan=False))
    else:
        answer, *details = filter(None, sections.values())
        shown = details if arguments.details else filter(None, [sections["compile"]])
        print("\n\n".join(section.text for section in (answer, *shown)))
    return 0


def _to_json(sections: dict[str, Section | None], **options) -> str:
    return json.dumps({key: section and section.values for key, section in sections.items()}, **options)


def plan_sections(arguments: PlanArguments) -> dict[str, Section | None]:
    """The sections of a plan by their key in --json, in printing order; None for a part that the plan does not have.

    Raises:
      UsageError: the config cannot run, a figure shows a part that it does not have, or its file cannot be written.
    """
    _check_flags(arguments)
    from mjax.planner import command
    from mjax.planner.scaling import read_scaling
    from mjax.planner.search import Budget
    from mjax.planner.time import default_calibration, read_calibration, time_section

    config, name, devices, fixed = arguments.settings, arguments.config, arguments.devices, arguments.fix
    sections: dict[str, Section | None] = dict.fromkeys(KEYS)
    gpu = calibration = None
    law = arguments.scaling and read_scaling(arguments.scaling, config)
    if arguments.gpu is not None:
        gpu = gpu_named(arguments.gpu).with_server(arguments.devices_per_node, arguments.network)
        file = arguments.calibration
        calibration = default_calibration(gpu) if file is None else read_calibration(file)
    if arguments.days is not None:
        budget = Budget(devices, gpu, arguments.days, arguments.tokens_per_parameter, law)
        config, sections["budget"] = command.run_budget(config, name, budget, calibration, fixed)
    if devices is not None:
        config, sections["search"] = command.run_search(config, name, devices, gpu, calibration, fixed)
    # A plan needs no data.
    validate(replace(config, data=replace(config.data, mock=True)), name)
    if arguments.schedule_figure is not None and config.mesh.pipe == 1:
        stages = "--mesh.pipe 2" + " --fix mesh.pipe" * (devices is not None)
        raise UsageError(f"--schedule-figure needs a pipeline; add stages to {name}, such as {stages}")
    if arguments.compile:
        command.check_compile(config, gpu)
    attention_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    if gpu is not None:
        command.check_float8(config, gpu.name, gpu.compute_capability)
    if arguments.write is not None:  # after all checks
        write_config(config, arguments.write, command.describe_config(sections["search"], name, config))

    sections["run"] = _run(config, name, gpu)
    sections["schedule"] = _schedule(config, arguments.schedule_figure)
    sections["memory"] = command.memory_section(config, gpu, arguments.memory_figure, name)
    sections["communication"] = _communication(config, name, arguments.communication_figure)
    if gpu is not None:
        try:
            sections["time"] = time_section(config, gpu, calibration)
            sections["dispatch"] = _dispatch(config, gpu, calibration)
        except UsageError as error:  # no peak is known: memory and communication need none
            why = {"gpu": gpu.name, "seconds": None, "why": str(error)}
            sections["time"] = Section(f"Step time on {gpu.name}", why, [str(error)], {"step": str(error)})
    rows = {key: row for part in filter(None, sections.values()) for key, row in part.answer.items()}
    sections["run"].lines.extend(format_rows(rows))
    sections["forecast"] = command.forecast_section(config, law, arguments.days is not None)
    if arguments.compile:
        sections["compile"] = command.compile_for(config, gpu)
    if (devices := arguments.max_sequence_on) is not None:
        config, sections["longest"] = command.longest_section(config, name, devices, gpu, calibration)
    if name != PYTHON_CONFIG:
        _add_command(_command(arguments, config), arguments.details, sections)
    return sections


def _add_command(line: str, details: bool, sections: dict[str, Section | None]) -> None:
    """End the first section with the forecast of the loss and the command that trains the config, if it fits."""
    fits = sections["longest"] or sections["memory"].values.get("fits", True)
    sections["run"].values["command"] = line if fits else None
    more = ["--details adds memory by kind, collectives and step time by part"] * (not details)
    forecast = ["", *sections["forecast"].lines] if sections["forecast"] and not details else []
    lines = [*forecast, *(["to train it:", f"  {line}"] if fits else []), *more]
    next(filter(None, sections.values())).lines.extend(lines)


def _command(arguments: PlanArguments, config: Config) -> str:
    """The command that trains `config`, with its differences from the named config as flags."""
    name, run, write = arguments.config, arguments.run, arguments.write
    file = name if run is None else f"{run}/config.json"
    base = config if write else load_config(file)
    flags = [to_flag(knob, new) for knob, (_, new) in differing_fields(base, config).items()]
    flags += [] if config.data.path or config.data.mock else ["--data.path PREFIX"]
    option = f"--run {run}" if run and not write and base.model == config.model else f"--config {write or file}"
    return " ".join(["python train.py", option, *flags])


def _check_flags(arguments: PlanArguments) -> None:
    """Refuse flags that cannot work, before JAX is imported."""
    for name in ("schedule_figure", "memory_figure", "communication_figure"):
        if (file := getattr(arguments, name)) is not None:
            check_picture(f"--{name.replace('_', '-')}", file)
    if arguments.write is not None:
        check_new(arguments.write)
    for name, needed in NEEDS.items():
        value = getattr(arguments, name)
        if value != getattr(PlanArguments, name) and getattr(arguments, needed.partition(" ")[0]) is None:
            values = value if isinstance(value, tuple) else (value,)
            shown = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in values)
            raise UsageError(f"--{name.replace('_', '-')} {shown} needs --{needed}; add it")


# --- The sections -----------------------------------------------------------------------------------------------------


def _run(config: Config, name: str, gpu: Gpu | None) -> Section:
    """The config: parameters, mesh and batch; later the answers of the other sections."""
    from mjax.models.build import count_active, count_parameters
    from mjax.planner.memory import cache_bytes

    mesh, train, parameters = config.mesh, config.train, count_parameters(config.model)
    active, trained = count_active(config.model), count_parameters(config.model, trained=True)
    per_token, per_sequence = cache_bytes(config) or (None, None)
    values = {
        "config": name,
        "parameters": parameters,
        "active_parameters": active,
        "trained_parameters": trained,
        "cache_bytes_per_token": per_token,
        "cache_bytes_per_sequence": per_sequence,
        "mesh": axes.cli_sizes(mesh),
        "sequence_parallel": mesh.splits_tokens,
        "context_attention": config.context_attention,
        "devices": mesh.devices,
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "micro_batches": config.micro_batches,
    }
    rows = {
        "parameters": f"{parameters:,}"
        + (f", {active:,} active per token" if active < parameters else "")
        + (f", {trained:,} trainable" if trained < parameters else ""),
        "devices": f"{mesh.devices:,} = {axes.describe_mesh(mesh, axes.PIPE)}"
        + ", sequence parallel" * mesh.splits_tokens,
        "global batch": f"{train.global_batch:,} = {mesh.data} data-parallel ranks × {config.micro_batches} "
        f"micro-batches of {train.micro_batch}",
        **({"context attention": config.context_attention} if config.context_attention else {}),
        "recomputation": train.recompute,
        "ZeRO stage": mesh.zero,
    }
    if per_token is not None:
        constant = f" and {per_sequence:,} per sequence" if per_sequence else ""
        rows["generation"] = f"{per_token:,} bytes of cache per token{constant}"
    on = "" if gpu is None else f" on {mesh.devices:,} × {gpu.name}, predicted"
    return Section(f"{name}{on}", values, [], rows)


def _schedule(config: Config, file: Path | None) -> Section | None:
    """The pipeline schedule, plotted into `file`."""
    if config.mesh.pipe == 1:
        return None
    from mjax.parallel.pipeline_schedules import find_schedule, slot_times
    from mjax.pictures.plan import describe_bubble, describe_in_flight, display_name, draw_schedule

    schedule, times = find_schedule(config), slot_times(config)
    if file is not None:
        draw_schedule(schedule, file, *times)
    values = {
        "name": schedule.name,
        "virtual_stages": schedule.chunks,
        "ticks": schedule.ticks,
        "bubble": schedule.bubble(*times),
        "max_in_flight": [schedule.max_in_flight(stage) for stage in range(schedule.stages)],
    }
    rows = {
        "schedule": display_name(schedule),
        "virtual stages per rank, V": schedule.chunks,
        "ticks": schedule.ticks,
        "bubble": describe_bubble(schedule, *times),
        "micro-batches in flight": describe_in_flight(schedule),
    }
    return Section("Schedule", values, format_rows(rows), {"bubble": rows["bubble"]})


def _communication(config: Config, name: str, file: Path | None) -> Section:
    """The collectives of the traced step by axis and source, plotted into `file`."""
    from mjax.planner.ledger import axes_name, ledger
    from mjax.utils.figures import human_bytes

    sends = ledger(config)
    if file is not None:
        from mjax.pictures.plan import draw_communication

        draw_communication(sends.bytes_by_source(), file, name)
    values = {
        "bytes_by_axis": {axes_name(axes): sent for axes, sent in sends.bytes_by_axis().items()},
        "collectives": sends.count,
        "bytes": sends.sent,
        "records": [record.values() for record in sends.records],
    }
    if not sends.records:
        return Section("Communication", values, ["none, on a mesh of one device"])
    differ = any(len(set(record.counts)) > 1 for record in sends.records)
    stage = ", on the pipeline stage that sends most" if differ else ""
    lines = [*str(sends).splitlines(), f"Calls and bytes sent (ring algorithms) per device and step{stage}."]
    largest = sorted(sends.bytes_by_axis().items(), key=lambda item: -item[1])[:3]
    answer = ", ".join(f"{human_bytes(sent)} over {axes_name(axes)}" for axes, sent in largest)
    return Section("Communication", values, lines, {"sends": f"{answer}, per device and step"})


def _dispatch(config: Config, gpu: Gpu, calibration) -> Section | None:
    """The two ways of tokens to the experts of other ranks: bytes, seconds and memory of a step."""
    if config.mesh.expert == 1:
        return None
    from mjax.planner.ledger import ledger
    from mjax.planner.search import make_predictors
    from mjax.utils.figures import human_bytes

    memory_of, time_of = make_predictors(gpu, calibration)
    values, lines = {"chosen": config.model.token_dispatcher(config.mesh.expert)}, []
    for way in ("allgather", "alltoall"):
        changed = with_values(config, {"model.moe_token_dispatcher": way})
        sent, seconds = ledger(changed).filter_axes(axes.EXPERT).sent, time_of(changed).total
        memory = memory_of(changed).total
        values[way] = {"bytes": sent, "seconds": seconds, "memory": memory}
        chosen = " (chosen)" if way == values["chosen"] else ""
        step = f"{seconds * 1e3:,.1f} ms a step, {human_bytes(memory)} per device"
        lines.append(f"{way}{chosen}: {human_bytes(sent)} over expert, {step}")
    return Section("Dispatch of tokens to experts", values, lines, {"dispatch": "\n".join(lines)})
