"""`mjax prepare --chat`: conversations as a dataset, with a mask of what the assistant wrote."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from rich.console import Console

from mjax.commands.arguments import ConversationArguments
from mjax.config import read_settings
from mjax.data.corpus import Corpus, TextFiles, parse
from mjax.data.corpus.blocks import OF_ROWS, Block, ending_of
from mjax.data.indexed import token_dtype
from mjax.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from mjax.errors import UsageError
from mjax.generation.chat import PLAIN, TEMPLATE, Chat, Trained, Unfit, encode, preview, refused


@dataclass
class Encoded:
    """The documents of one block.

    Attributes:
      tokens: token ids of all documents one after the other, [tokens] in their dtype on disk.
      lengths: tokens in each sequence, int32 [sequences].
      sequences: sequences in each document, int64 [documents].
      malformed: what is malformed in the block, in order.
      counts: documents, sequences, tokens, text_bytes (in UTF-8); of conversations trained tokens; dropped and cut,
        which were too long; endless, whose last turn ends without a special token.
      trained: of conversations, whether each token is trained, bool [tokens].
      stops: ids of the special tokens that end conversations.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray
    malformed: list[str]
    counts: dict[str, int]
    trained: np.ndarray | None = None
    stops: frozenset[int] = frozenset()

    def __post_init__(self):
        sizes = {"documents": self.sequences, "sequences": self.lengths, "tokens": self.tokens}
        self.counts |= {name: len(values) for name, values in sizes.items()}


ONLY = {
    field.name: field.default
    for field in fields(ConversationArguments)
    if field.name in ConversationArguments.__annotations__ and field.name != "chat"
}
"""Flags that go with --chat, and their defaults."""


def check_chat(arguments: ConversationArguments, tokenizer: str | None, of_text: Mapping[str, object]) -> None:
    """Refuse flags that do not go with --chat, or only with it, and a run without a chat template.

    Args:
      arguments: as parsed.
      tokenizer: --tokenizer.
      of_text: flags that are for text, with their values.

    Raises:
      UsageError: one sentence.
    """
    if not arguments.chat:
        for name, default in ONLY.items():
            if getattr(arguments, name) != default:
                raise UsageError(f"--{name.replace('_', '-')} is for conversations; add --chat, or leave it out")
        return
    if flags := [flag for flag, value in of_text.items() if value]:
        raise UsageError(f"{flags[0]} is for text, and --chat for conversations; leave one out")
    kind, _, run = (tokenizer or "").partition(":")
    if kind != "run":
        raise UsageError("--chat needs the tokenizer and chat template of the model to train; add --tokenizer run:RUN")
    if arguments.template is None and not (Path(run) / "tokenizer" / TEMPLATE).is_file():
        raise UsageError(f"{run} has no chat template; add --template FILE, or plain for User: … Assistant: …")
    if arguments.template not in (None, "plain") and not Path(arguments.template).is_file():
        raise UsageError(f"there is no file {arguments.template}; give a chat template in Jinja, or --template plain")


def longest_of(run: Path) -> int:
    """Tokens of the longest conversation that the model of a run takes."""
    return read_settings(run / "config.json").model.sequence + 1


def save_chat(template: str | None, run: Path, folder: Path, tokenizer: Tokenizer) -> None:
    """Copy what a run has beside its tokenizer, and write another chat template, into the folder of a tokenizer.

    The plain template begins with the token that begins texts of the tokenizer.
    """
    shutil.copytree(run / "tokenizer", folder, dirs_exist_ok=True)
    if template == "plain":
        begins = isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.bos is not None
        begin = tokenizer.library.id_to_token(tokenizer.bos) if begins else ""
        (folder / TEMPLATE).write_text(begin + PLAIN, encoding="utf-8")
    elif template is not None:
        shutil.copy(template, folder / TEMPLATE)


def conversations_of(arguments: ConversationArguments) -> TextFiles:
    """The conversations of the inputs.

    Raises:
      UsageError: a file is text.
    """
    corpus = replace(arguments, key="").open()
    for file in corpus.files:
        if ending_of(file) not in OF_ROWS:
            raise UsageError(f"{file} is text, and --chat reads conversations from {', '.join(OF_ROWS)}; convert it")
    return corpus


def show_first(arguments: ConversationArguments, corpus: Corpus, folder: Path) -> None:
    """Print the first conversations, with what is trained in green."""
    console, chat = Console(soft_wrap=True, highlight=False), Chat(folder)
    for document in islice(corpus, arguments.preview):
        try:
            encoded = encode(chat, document.fields, _trained(arguments))
        except Unfit as error:
            raise refused(document.source, error, document.fields) from None
        console.rule(document.source, style="dim")
        console.print("dropped, it is too long" if encoded is None else preview(chat, encoded))
    console.rule(style="dim")


def _trained(arguments: ConversationArguments) -> Trained:
    return Trained(arguments.turns, arguments.reasoning, arguments.longest, arguments.too_long)


class ConversationEncoder:
    """Encodes blocks of conversations: renders each by the chat template, and marks what is trained."""

    def __init__(self, arguments: ConversationArguments, key: str, folder: Path, tokenizer: Tokenizer):
        self.trained, self.skip = _trained(arguments), arguments.malformed == "skip"
        self.tokenizer = tokenizer
        self.chat = Chat(folder, self.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocabulary)

    def encode(self, block: Block) -> Encoded:
        """The conversations of a block as token ids and masks."""
        documents, malformed = parse(block, "")
        encoded, dropped = [], 0
        for document in documents:
            try:
                one = encode(self.chat, document.fields, self.trained)
                self._check_ids(() if one is None else one.ids)
            except Unfit as error:
                if not self.skip:
                    raise refused(document.source, error, document.fields) from None
                malformed.append(f"{document.source}: {error}")
                continue
            dropped += one is None
            encoded += [] if one is None else [one]
        lengths = np.array([len(one.ids) for one in encoded], np.int32)
        total = int(lengths.sum())
        trained = np.fromiter(chain.from_iterable(one.trained for one in encoded), bool, total)
        return Encoded(
            tokens=np.fromiter(chain.from_iterable(one.ids for one in encoded), self.dtype, total),
            lengths=lengths,
            sequences=np.ones(len(encoded), np.int64),
            malformed=malformed,
            counts={
                "text_bytes": sum(one.text_bytes for one in encoded),
                "trained": int(trained.sum()),
                "dropped": dropped,
                "cut": sum(one.cut for one in encoded),
                "endless": sum(one.stops is None and not one.cut for one in encoded),
            },
            trained=trained,
            stops=frozenset(one.stops for one in encoded if one.stops is not None),
        )

    def _check_ids(self, ids) -> None:
        if ids and max(ids) >= self.tokenizer.vocabulary:
            token = self.chat.decode([max(ids)], special=True)
            raise Unfit(
                f"the chat template writes {token}, id {max(ids)}, and the model has {self.tokenizer.vocabulary:,} ids"
            )
