"""A config as a file of short Python, formatted as by ruff, that has only the differences from the defaults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mjax.config
from mjax.config import Config
from mjax.config.model_file import file_of
from mjax.errors import UsageError, check_folder
from mjax.utils.files import write_whole


def check_new(file: Path, flag: str = "--write") -> None:
    """Refuse an output file that cannot be written, before any work is done.

    Raises:
      UsageError: it is not a .py file, it exists already, or its folder does not.
    """
    if file.suffix != ".py":
        raise UsageError(f"{flag} {file} is not a Python file; use a name that ends in .py")
    if file.exists():
        raise UsageError(f"{flag} {file} already exists and is not overwritten; use another file, or move it away")
    check_folder(flag, file)


def write_config(config: Config, file: Path, about: str) -> None:
    """Write `config` into the new file `file`, atomically; `load_config` returns exactly this config.

    Args:
      config: the config.
      file: its path, ending in .py.
      about: docstring of the file: a first line, an empty one, and further text.

    Raises:
      UsageError: the file exists already, or its folder does not.
    """
    text = config_source(config, about)
    check_new(file)
    write_whole(file, text)


def config_source(config: Config, about: str) -> str:
    """The text of a config file."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    default = Config()
    changed = {name: _changed(section) for name, section in sections.items() if section != getattr(default, name)}
    names, own_models, of_folders = ["Config"], "", ""
    for cls in (type(sections[name]) for name in changed):
        file = file_of(cls)
        if file is None and not hasattr(mjax.config, cls.__name__):
            of_folders += f"from {cls.__module__} import {cls.__name__}\n"
        else:
            names.append(cls.__name__ if file is None else "load_config")
        own_models += f"{cls.__name__} = type(load_config({_literal(file)}).model)\n\n" if file else ""
    calls = ""
    for name, values in changed.items():
        arguments = "".join(f"        {field}={_literal(value)},\n" for field, value in values.items())
        calls += f"    {name}={type(sections[name]).__name__}(\n{arguments}    ),\n"
    docstring = about.strip().replace("\\", "\\\\").replace('"""', "'''")
    imports = "from mjax.config import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"
    return f'"""{docstring}\n"""\n\n{imports}\n{of_folders}\n{own_models}config = Config(\n{calls})\n'


def _changed(section: Any) -> dict[str, Any]:
    """The fields of a section that differ from their defaults."""
    fields = dataclasses.fields(section)
    return {field.name: value for field in fields if (value := getattr(section, field.name)) != field.default}


def _literal(value: Any) -> str:
    """A value as Python source; whole numbers with underscores."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:_}"
    if isinstance(value, tuple):
        parts = [_literal(part) for part in value]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
