"""The communication ledger as a section of `mjax plan`."""

from __future__ import annotations

from mjax.planner.comms import Collective, Ledger
from mjax.planner.section import Section, table


def communication_section(ledger: Ledger, figure: str | None = None) -> Section:
    """What a device sends in a step, by axis and source; `figure` is the file of the picture, if there is one."""
    values = {
        "bytes_by_axis": {axes_name(axes): sent for axes, sent in ledger.by_axis().items()},
        "bytes_by_source": ledger.by_source(),
        "collectives": ledger.count,
        "bytes": ledger.sent,
        "records": [record.values() for record in ledger.records],
        "figure": figure,
    }
    if not ledger.records:
        return Section("Communication", values, ["none: one device has nobody to talk to"])
    rows = []
    for axes in sorted(ledger.by_axis(), key=ledger.by_axis().get, reverse=True):
        over = ledger.over(*axes)
        for (source, kind), part in _grouped(over.records).items():
            rows.append((axes_name(axes), source, kind, f"{part.count:,}", human_bytes(part.sent)))
        rows.append((axes_name(axes), "all", "", f"{over.count:,}", human_bytes(over.sent)))
    lines = table(("over", "from", "collective", "times", "sends"), rows, left=3)
    lines.append("Times and bytes (on a ring) are those of one device in one step" + _where(ledger) + ".")
    if figure is not None:
        lines.append(f"picture: {figure}")
    return Section("Communication", values, lines)


def axes_name(axes: tuple[str, ...]) -> str:
    """'data', or 'pipe × data' of a collective over both."""
    return " × ".join(axes)


def human_bytes(count: float) -> str:
    """'23.79 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _grouped(records: tuple[Collective, ...]) -> dict[tuple[str, str], Ledger]:
    groups: dict[tuple[str, str], list[Collective]] = {}
    for record in records:
        groups.setdefault((record.source, record.kind), []).append(record)
    return {key: Ledger(tuple(group)) for key, group in groups.items()}


def _where(ledger: Ledger) -> str:
    """Which device, where they differ."""
    differ = any(len(set(record.counts)) > 1 for record in ledger.records)
    return ", in each row on the pipeline stage that sends most" if differ else ""
