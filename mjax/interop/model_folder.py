"""A model folder: written atomically; its JSON files; and README.md, the model card.

A block of the card between two comments states the model's source and how to open it. The rest of the card stays, with
the front matter, which has the license. `from-hf` copies the card into the run, for `to-hf`.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mjax.config.model import ModelConfig
from mjax.config.plain_values import read
from mjax.errors import UsageError
from mjax.models.huggingface.family import Family
from mjax.utils.files import rename, to_disk


def check_output(folder: Path, overwrite: bool | None = None) -> None:
    """Check that a folder may be written.

    Args:
      folder: to write.
      overwrite: True to replace an exported model or adapter: a folder with its config.json, and files only; None for
        a command without `--overwrite`.

    Raises:
      UsageError: `folder` is a file, or contains anything else.
    """
    entries = {entry.name: entry.is_dir() for entry in folder.iterdir()} if folder.is_dir() else None
    if not folder.exists() or entries == {}:
        return
    is_model = entries and not {"config.json", "adapter_config.json"}.isdisjoint(entries) and not any(entries.values())
    if not overwrite:
        replace = "--overwrite replaces it; or " if overwrite is False and is_model else ""
        raise UsageError(f"{folder} exists; {replace}give a folder that is empty or does not exist")
    if not is_model:
        raise UsageError(f"--overwrite replaces models only, and {folder} is not one; give another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder next to `folder`, which replaces it at the end.

    Call `check_output` before.
    """
    folder = folder.resolve()  # the target of a symbolic link
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = Path(tempfile.mkdtemp(prefix=f"{folder.name}.writing-", dir=folder.parent))
    temporary, old = parent / "new", parent / "old"
    temporary.mkdir()
    try:
        yield temporary
        to_disk(temporary)
        if folder.exists():
            rename(folder, old)
        rename(temporary, folder)
    finally:
        if old.exists() and not folder.exists():  # stopped between the two renames
            rename(old, folder)
        shutil.rmtree(parent, ignore_errors=True)


def read_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a foreign file.

    Raises:
      UsageError: there is no such file, or it is not a JSON object.
    """
    fix = "restore it, or download the model again"
    return read(dict[str, Any], file, fix, "give a folder written by save_pretrained")


def write_object(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON object in the format of `transformers`."""
    file.write_bytes(to_json(values))


def to_json(values: dict[str, Any]) -> bytes:
    """A JSON object in the format of `transformers`."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


# --- Model card -------------------------------------------------------------------------------------------------------

MODEL_CARD = "README.md"
BEGIN, END = "<!-- mjax convert: begin -->", "<!-- mjax convert: end -->"
FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)


def read_card(folder: Path) -> str:
    """Read the card in a folder; empty without one.

    Raises:
      UsageError: it is not text.
    """
    file = folder / MODEL_CARD
    try:
        return file.read_text(encoding="utf-8").replace("\r\n", "\n") if file.is_file() else ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a text file in UTF-8 (byte {error.start}); correct or remove it") from None


def replace_block(card: str, block: str) -> str:
    """Replace the block of a card, or insert one at the beginning."""
    block = f"{BEGIN}\n{block.strip()}\n{END}\n\n"
    if BLOCK.search(card):
        return BLOCK.sub(lambda _: block, card, count=1).rstrip() + "\n"
    front = FRONT_MATTER.match(card)
    head = front[0] if front else "---\nlibrary_name: transformers\n---\n"
    return f"{head}\n{block}{card[front.end() if front else 0 :].lstrip()}".rstrip() + "\n"


def read_history(card: str) -> list[str]:
    """Read the earlier conversions of a model, a line each, from the block in its card."""
    block = BLOCK.search(card)
    return [line for line in (block[0] if block else "").splitlines() if line.startswith("- ")]


def make_card(source: Path, model: str, rope: str = "") -> str:
    """The card of a run with the weights of a folder, with a line on the conversion.

    Args:
      source: the folder.
      model: description of the model.
      rope: the result of `describe_rope`.

    Raises:
      UsageError: the card of the folder is not text.
    """
    card = read_card(source)
    line = f"- converted by mjax from `{source.resolve().name}`, {model}{rope and f', with {rope}'}"
    return replace_block(card, "\n".join([*read_history(card), line]))


def describe_export(
    name: str, family: Family, model: ModelConfig, parameters: int, dtype: str, lines: list[str], tokenizer: bool
) -> str:
    """The block of an export.

    Args:
      name: of its folder.
      family: of the model.
      model: the model.
      parameters: number of parameters.
      dtype: of the tensors, torch's name.
      lines: the result of `read_history`, and this conversion.
      tokenizer: True if the folder has one.
    """
    summary = f"`{family.model}` with {parameters:,} parameters in {dtype}: {model.layers} layers, hidden size "
    summary += f"{model.hidden:,}, vocabulary {model.vocabulary:,}, sequences of up to {model.max_positions:,} tokens."
    classes = ["AutoModelForCausalLM" if family.generates else family.model, *["AutoTokenizer"] * tokenizer]
    variables = zip(("model", "tokenizer"), classes, strict=False)
    code = [f"from transformers import {', '.join(classes)}", ""]
    code += [f'{variable} = {cls}.from_pretrained("{name}")' for variable, cls in variables]
    return "\n".join([f"# {name}", "", summary, "", *lines, "", "```py", *code, "```"])
