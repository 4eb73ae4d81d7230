"""Writes mjax/interop/megatron/settings.tsv: every setting of Megatron, its defaults, its class, and the reason.

    python scripts/make_megatron_settings.py 0.16.1=FOLDER 0.19.2=FOLDER …

A folder holds an unpacked wheel of that megatron-core (pip download --no-deps; unzip). The Python needs torch, and
triton for 0.19 (pip install --no-deps triton). Settings are the fields of TransformerConfig, MLATransformerConfig and
HeterogeneousTransformerConfig, the arguments of megatron.training, which wheels contain from 0.17 on, what it adds to
them at run time, and arguments of older versions in tests/interop/megatron_arguments.txt. Classes are those of
megatron_settings.txt; all other settings are refused unless at a default.
"""

import argparse
import dataclasses
import enum
import json
import re
import subprocess
import sys
import typing
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent
TABLE = SCRIPTS.parent / "mjax/interop/megatron/settings.tsv"
OLD_ARGUMENTS = SCRIPTS.parent / "tests/interop/megatron_arguments.txt"
REFUSED = ("refused", "may change what the model computes")
COLUMNS = ("name", "class", "config", "argument", "reason")


def read_classes(text: str) -> list[tuple[str, str, str]]:
    """(pattern, class, reason) in the order of the file."""
    rules, heading = [], ("", "")
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(.+)\] (.+)", line):
            heading = (match[1], match[2])
        elif not line.startswith("#"):
            rules += [(pattern, *heading) for pattern in line.split()]
    return rules


def classify(name: str, rules: list[tuple[str, str, str]]) -> tuple[str, str]:
    """Class and reason of a setting: those of its name, or else of the first pattern that matches it."""
    matches = [rule for rule in rules if fnmatchcase(name, rule[0])]
    exact = [rule for rule in matches if rule[0] == name]
    return (exact or matches or [("", *REFUSED)])[0][1:]


def changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults by version, without those that equal the previous version's."""
    found, last = {}, object()
    for version, value in values.items():
        if (type(value), value) != (type(last), last):
            found[version] = last = value
    return found


def make_table(versions: Mapping[str, Mapping[str, Mapping[str, Any]]], old: list[str]) -> str:
    """The table of all settings.

    Args:
      versions: version → {"config": {name: default}, "argument": …, "computed": …}, oldest first.
      old: names of arguments of versions before.
    """
    rules = read_classes((SCRIPTS / "megatron_settings.txt").read_text(encoding="utf-8"))
    names = {name for settings in versions.values() for group in settings.values() for name in group}
    rows = ["\t".join(COLUMNS)]
    for name in sorted(names | set(old) | {pattern for pattern, *_ in rules if "*" not in pattern}):
        kind, reason = classify(name, rules)
        cells = [
            changes({version: groups[group][name] for version, groups in versions.items() if name in groups[group]})
            for group in ("config", "argument")
        ]
        rows.append("\t".join([name, kind, *(json.dumps(cell) if cell else "" for cell in cells), reason]))
    return "\n".join(rows) + "\n"


def read_config_defaults() -> dict[str, Any]:
    """Defaults of the fields of megatron-core's transformer configs; None for required fields."""
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    defaults: dict[str, Any] = {}
    for config in (HeterogeneousTransformerConfig, MLATransformerConfig, TransformerConfig):  # subclasses change some
        for field in dataclasses.fields(config):
            if field.default_factory is not dataclasses.MISSING:
                defaults[field.name] = to_json(field.default_factory())
            else:
                defaults[field.name] = None if field.default is dataclasses.MISSING else to_json(field.default)
    return defaults


def read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Defaults of the megatron-core in a folder, which this process must not have imported before."""
    sys.path.insert(0, str(folder))
    if not hasattr(typing, "override"):  # before Python 3.12, which megatron-core 0.18 requires
        typing.override = lambda method: method
    groups = {"config": read_config_defaults(), "argument": {}, "computed": {}}
    if (folder / "megatron/training").is_dir():
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        names = [action.dest for action in parser._actions if action.dest != "help"]
        groups["argument"] = {name: to_json(parser.get_default(name)) for name in names}
        for file in (folder / "megatron/training").rglob("*.py"):
            assigned = re.findall(r"\bargs\.(\w+)\s*(?:=(?!=)|\+=)", file.read_text(encoding="utf-8"))
            groups["computed"] |= dict.fromkeys(set(assigned) - set(names))
    return groups


def to_json(value: Any) -> Any:
    """A default as JSON; None for functions."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if callable(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def main(arguments: list[str]) -> None:
    """Write the table, or with `--one FOLDER` print the settings of one version."""
    if arguments[:1] == ["--one"]:
        settings = read_settings(Path(arguments[1]))
        print(json.dumps(settings))
        return
    versions = {}
    for version, folder in (argument.split("=", 1) for argument in arguments):
        command = [sys.executable, __file__, "--one", folder]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        versions[version] = json.loads(output.splitlines()[-1])
    old = [word.split("=")[0] for word in OLD_ARGUMENTS.read_text(encoding="utf-8").split()]
    TABLE.write_text(make_table(versions, old), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
