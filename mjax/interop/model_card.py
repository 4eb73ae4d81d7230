"""README.md of a model: what it is, where it comes from and how to open it, as a block in the card it had.

The block stands between two comments, and everything else in the card is someone else's: it is kept, with the front
matter, which has the license. `from-hf` puts the card into the run, so that it is there for `to-hf`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mjax.config.model import ModelConfig
from mjax.errors import UsageError
from mjax.interop.family import Family

CARD = "README.md"
BEGIN, END = "<!-- mjax convert: begin -->", "<!-- mjax convert: end -->"
FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)


def read_card(folder: Path) -> str:
    """The card in a folder; empty without one.

    Raises:
      UsageError: it is not text.
    """
    file = folder / CARD
    try:
        return file.read_text(encoding="utf-8").replace("\r\n", "\n") if file.is_file() else ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a text file in UTF-8 (byte {error.start}); correct or remove it") from None


def with_block(card: str, block: str) -> str:
    """The card with this block in place of the one that it has, or at the beginning."""
    block = f"{BEGIN}\n{block.strip()}\n{END}\n\n"
    if BLOCK.search(card):
        return BLOCK.sub(lambda _: block, card, count=1).rstrip() + "\n"
    front = FRONT_MATTER.match(card)
    head = front[0] if front else "---\nlibrary_name: transformers\n---\n"
    return f"{head}\n{block}{card[front.end() if front else 0 :].lstrip()}".rstrip() + "\n"


def history(card: str) -> list[str]:
    """The conversions of a model so far, a line each, from the block in its card."""
    block = BLOCK.search(card)
    return [line for line in (block[0] if block else "").splitlines() if line.startswith("- ")]


def imported_card(source: Path, model: str) -> str:
    """The card of a run that has the weights of the folder `source`, which is this model, with a line on that.

    Raises:
      UsageError: the card of the folder is not text.
    """
    card = read_card(source)
    lines = [*history(card), f"- converted by mjax from `{source.resolve().name}`, {model}"]
    return with_block(card, "\n".join(lines))


def description(
    name: str, family: Family, model: ModelConfig, parameters: int, dtype: str, lines: list[str], tokenizer: bool
) -> str:
    """The block of an export.

    Args:
      name: of its folder.
      family: of the model.
      model: the model.
      parameters: their number.
      dtype: of the tensors, in torch's name.
      lines: its `history`, with this conversion.
      tokenizer: whether the folder has one.
    """
    width = f"{model.layers} layers, hidden size {model.hidden:,}, {model.heads} attention heads"
    if model.groups != model.heads:
        width += f" ({model.groups} of keys and values)"
    opened = "AutoModelForCausalLM" if family.generates else family.model
    names = f"{opened}, AutoTokenizer" if tokenizer else opened
    code = [f"from transformers import {names}", "", f'model = {opened}.from_pretrained("{name}")']
    code += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] * tokenizer
    facts = f"`{family.model}` with {parameters:,} parameters in {dtype}: {width}, vocabulary {model.vocabulary:,}, "
    facts += f"sequences of up to {model.sequence:,} tokens."
    return "\n".join([f"# {name}", "", facts, "", *lines, "", "```py", *code, "```"])
