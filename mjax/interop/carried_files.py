"""Files of a model folder that mjax only carries: in a run folder beside the tokenizer's own, and out again.

    RUN/tokenizer/chat_template.jinja      the default chat template, wherever the model folder had it
    RUN/tokenizer/tokenizer_config.json    class and special tokens for `transformers`; other templates by name
    RUN/tokenizer/generation_config.json   the ids that end a text, and how the model is meant to be sampled
    RUN/tokenizer/special_tokens_map.json, tokenizer.model, …   byte for byte

So `AutoTokenizer` gives for an export what it gave for the source: ids, special tokens and `apply_chat_template`. A
template is a file of its own since transformers 4.43, and before that a setting `chat_template` of
tokenizer_config.json, as text or as a list of named templates. Both are read, and both are written: except several
templates, which are a list, because a file beside it would hide the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mjax.errors import UsageError
from mjax.interop.model_folder import read_object

TEMPLATE, NAMED = "chat_template.jinja", "additional_chat_templates"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
UNREAD = (
    *("special_tokens_map.json", "added_tokens.json", "tokenizer.json", "tokenizer.model"),
    *("vocab.json", "merges.txt"),
)
"""Files of a tokenizer that are carried as they are."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def carried_files(folder: Path, config: dict[str, Any]) -> dict[str, bytes]:
    """The files of a model folder to put beside the tokenizer of a run; none without a tokenizer_config.json.

    Args:
      folder: of the model.
      config: its config.json, which has the ids that end a text where there is no generation_config.json.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / SETTINGS).is_file():
        return {}
    settings = read_object(folder / SETTINGS)
    templates = _files(folder) or _setting(folder, settings)
    default = templates.pop("default", None)
    if templates:
        settings["chat_template"] = _listed(templates)
    generation = {name: config[name] for name in IDS if config.get(name) is not None}
    if (folder / GENERATION).is_file():
        generation = read_object(folder / GENERATION)
    files = _unread(folder) | {SETTINGS: _json(settings), GENERATION: _json(generation)}
    return files | ({TEMPLATE: default.encode()} if default is not None else {})


def restored_files(folder: Path) -> dict[str, bytes]:
    """The files of an export, from the tokenizer's folder of a run; none if none were carried.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / SETTINGS).is_file():
        return {}
    files, settings = _unread(folder), read_object(folder / SETTINGS)
    templates = _setting(folder, settings) | _files(folder)
    if [*templates] == ["default"]:
        settings["chat_template"] = templates["default"]
        files[TEMPLATE] = templates["default"].encode()
    elif templates:
        settings["chat_template"] = _listed(templates)
    if (folder / GENERATION).is_file():
        files[GENERATION] = _json(read_object(folder / GENERATION))
    return files | {SETTINGS: _json(settings)}


def _unread(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in UNREAD if (folder / name).is_file()}


def _setting(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates in tokenizer_config.json, by name; taken out of it."""
    setting = settings.pop("chat_template", None) or []
    if isinstance(setting, str):
        return {"default": setting}
    if not isinstance(setting, list) or not all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("name", "template"))
        for each in setting
    ):
        raise UsageError(
            f"{folder / SETTINGS}: chat_template is neither text nor a list of templates with name and template; "
            "restore the file"
        )
    return {each["name"]: each["template"] for each in setting}


def _files(folder: Path) -> dict[str, str]:
    """The chat templates in files of their own, by name; `transformers` looks no further where there are any."""
    files = {file.stem: file for file in sorted((folder / NAMED).glob("*.jinja"))}
    if (folder / TEMPLATE).is_file():
        files["default"] = folder / TEMPLATE
    try:
        return {name: file.read_bytes().decode() for name, file in files.items()}
    except UnicodeDecodeError as error:
        raise UsageError(f"{folder} has a chat template that is not UTF-8 ({error}); download it again") from None


def _listed(templates: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
