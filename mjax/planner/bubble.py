"""Idle time of a pipeline and its empty messages, as closed forms of the schedules (`parallel/schedules.py`)."""

from __future__ import annotations

from mjax.config import MeshConfig


def bubble(mesh: MeshConfig, m: int, forward: float, inputs: float, weights: float) -> float:
    """Idle seconds of the last stage in a step of `m` micro-batches.

    Closed forms of `Schedule.makespan`, since a table of thousands of micro-batches is too slow for a search.

    Args:
      mesh, m: the pipeline.
      forward, inputs, weights: seconds of F, and of the halves of a backward pass, of one chunk.
    """
    fill = mesh.pipe - 1
    if mesh.schedule != "zb-h1":
        return fill * (forward + inputs + weights)
    # A tick has one operation on each stage and takes as long as the longest of them.
    work = m * mesh.chunks
    return ticks(mesh, m) * max(forward, inputs, weights) - work * (forward + inputs + weights)


def ticks(mesh: MeshConfig, m: int) -> int:
    """Length of the schedule's table for `m` micro-batches."""
    work, stages = m * mesh.chunks, mesh.pipe
    if mesh.schedule == "zb-h1":
        return 3 * work + stages - 1 + max(0, stages - m)
    if mesh.schedule == "gpipe":
        return 2 * (work + stages) - 3
    return work + stages * mesh.chunks + stages - 2


def empty_messages(mesh: MeshConfig, m: int, every_tick: bool) -> int:
    """Messages beyond two per micro-batch and chunk: two per stage to fill, or those of all ticks."""
    if every_tick:
        return 2 * (ticks(mesh, m) - m * mesh.chunks)
    return 2 * (mesh.pipe - 1)
