"""Conversations as text, by the chat template that a model brings along, and as token ids.

A chat template is a Jinja program in `RUN/tokenizer/chat_template.jinja`, which `chat_template.py` renders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from mjax.data.tokenizers.huggingface import check_sizes
from mjax.data.tokenizers.library import library_errors
from mjax.errors import UsageError, lines_of
from mjax.generation.chat_template import Template, TemplateError
from mjax.generation.inference import ends_of_text, optional_object
from mjax.utils.files import parse_json

TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARK = "(here the answer goes on)"
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]


class Chat:
    """The chat template of a run, its special tokens, and the ids that end a turn.

    Attributes:
      stops: ids that end the answer of the model.
    """

    def __init__(self, run: Path, eod: int, flag: str = "--chat"):
        """Read the template of a run folder.

        Args:
          run: its folder.
          eod: the end of document of its tokenizer, which ends an answer too.
          flag: that asked for it, for messages.

        Raises:
          UsageError: there is no template or no tokenizer.json, or one of the files is damaged.
        """
        folder = run / "tokenizer"
        self.file = folder / TEMPLATE
        if not self.file.is_file():
            fix = f"leave it out, or put the model's {TEMPLATE} into {folder}"
            raise UsageError(f"{flag}: {run} has no chat template; {fix}")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(
                f"{flag} needs the tokens that a template spells, from {file}; "
                "convert the model again from a folder that has its tokenizer.json"
            )
        content = file.read_bytes()
        check_sizes(content, str(file))
        with library_errors(f"{file} is not a tokenizer.json", "restore it"):
            self._library = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._library.no_truncation()
        self._library.no_padding()
        file = folder / "tokenizer_config.json"
        settings = optional_object(file)
        tokens = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
        self._special = {
            name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
        }
        for name, token in self._special.items():
            if not isinstance(token, str):
                raise UsageError(f"{file}: {name} is {tokens[name]!r}, not a token; restore the file")
        end = self._library.token_to_id(self._special.get("eos_token", ""))
        self.stops = sorted({*ends_of_text(run, eod), *([] if end is None else [end])})
        with self._errors():
            self._template = Template(self.file.read_text(encoding="utf-8"))

    def render(self, messages: Sequence[Message], tools: list | None = None, goes_on: bool = False) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Args:
          messages: of the conversation.
          tools: that the model may call.
          goes_on: whether the last message is the beginning of the answer, and the text ends with it.

        Raises:
          UsageError: the template refuses it.
        """
        if goes_on:
            last = {**messages[-1], "content": f"{messages[-1].get('content')}{MARK}"}
            return self._rendered([*messages[:-1], last], tools, False).rpartition(MARK)[0]
        return self._rendered(messages, tools, True)

    def _rendered(self, messages: Sequence[Message], tools: list | None, answer: bool) -> str:
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        with self._errors():
            return self._template.render(
                messages=[_with_reasoning(message) for message in plain],
                tools=tools,
                documents=None,
                add_generation_prompt=answer,
                **self._special,
            )

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered conversation, in which special tokens are what they spell."""
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn whatever goes wrong in the template into one sentence."""
        try:
            yield
        except (TemplateError, OSError, ValueError) as error:
            raise UsageError(
                f"the chat template {self.file} refuses the conversation or is damaged ({error}); change the messages, "
                "or restore the file"
            ) from None


def read_conversations(text: str) -> list[tuple[list[Message], list | None]]:
    """Conversations in JSON, with their tools: one, or one a line. Each is a list of messages or has "messages".

    Raises:
      UsageError: it is not JSON, or not a conversation.
    """
    fix = 'write [{"role": "user", "content": "…"}], or one such list on each line'
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError):
        lines = [line for line in lines_of(text) if line.strip()]
        values = [parse_json(line, f"line {number} of stdin", fix) for number, line in enumerate(lines, start=1)]
    conversations = []
    for value in values:
        conversation = value if isinstance(value, dict) else {"messages": value}
        messages, tools = conversation.get("messages"), conversation.get("tools")
        are_messages = isinstance(messages, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        )
        if not messages or not are_messages or not isinstance(tools, list | None):
            raise UsageError(f"stdin has JSON that is not a conversation; {fix}")
        conversations.append((messages, tools))
    return conversations


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
