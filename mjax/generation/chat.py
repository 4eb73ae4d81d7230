"""Conversations as text, by the chat template that a model brings along, and as token ids.

A chat template is a Jinja program in `RUN/tokenizer/chat_template.jinja`, which `chat_template.py` renders. A model
without one can be taught `PLAIN`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from mjax.data.tokenizer_trial import check_expansion
from mjax.data.tokenizers import (
    EOD_PIECE,
    Tokenizer,
    ends_of_text,
    open_library,
    optional_object,
    tokenizer_from_folder,
)
from mjax.data.tokenizers.kinds import WHOLE_FILES, library_errors
from mjax.errors import UsageError, lines_of
from mjax.utils.files import parse_json

TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARK = "(here the answer goes on)"
REASONING = ("reasoning_content", "thinking", "reasoning")
PLAIN = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
Assistant:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
{%- else -%}
{{ message['role'] | capitalize }}: {{ message['content'] }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""
"""User: …, a line break, Assistant: … and the end of document."""
Spans = list[tuple[int, int]]
Message = dict[str, Any]


class Chat:
    """The chat template of a run, its special tokens, and the ids that end a turn.

    Attributes:
      stops: ids that end the answer of the model.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer | None = None, flag: str = "--chat"):
        """Read the template of a tokenizer's folder.

        Args:
          folder: of the tokenizer, such as RUN/tokenizer.
          tokenizer: whose end of document ends an answer too; by default that of the folder.
          flag: that asked for it, for messages.

        Raises:
          UsageError: there is no template, or one of the files is damaged.
        """
        self.file = folder / TEMPLATE
        if not self.file.is_file():
            raise UsageError(
                f"{flag}: {folder} has no chat template; leave it out, put the model's {TEMPLATE} there, or teach the "
                "model to chat with `mjax sft`"
            )
        source = self.file.read_bytes().decode("utf-8", errors="replace")
        self._tokenizer = tokenizer or tokenizer_from_folder(folder)
        self._library, file = None, folder / "tokenizer.json"
        if file.is_file():
            self._library = open_library(file.read_bytes(), str(file))
            self._library.no_truncation()
            self._library.no_padding()
        file = folder / "tokenizer_config.json"
        settings = optional_object(file)
        tokens = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
        if self._library is None and (tokens or "bos_token" in source):
            raise UsageError(
                f"{flag} needs the tokens that {self.file} spells, from {folder / 'tokenizer.json'}; "
                "convert the model again from a folder that has its tokenizer.json"
            )
        tokens = {"eos_token": EOD_PIECE} if self._library is None else tokens
        self._special = {
            name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
        }
        for name, token in self._special.items():
            if not isinstance(token, str):
                raise UsageError(f"{file}: {name} is {tokens[name]!r}, not a token; restore the file")
        end = None if self._library is None else self._library.token_to_id(self._special.get("eos_token", ""))
        self.stops = sorted({*ends_of_text(folder, self._tokenizer.eod), *([] if end is None else [end])})
        from mjax.generation.chat_template import Template  # with Jinja, which no --help needs

        with self._errors():
            self._template = Template(source)

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
            return self.rendered([([*messages[:-1], last], False)], tools)[0][0].rpartition(MARK)[0]
        return self.rendered([(messages, True)], tools)[0][0]

    @property
    def marks(self) -> bool:
        """True if the template may mark what the assistant writes."""
        return self._template.marks

    def rendered(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], tools: list | None
    ) -> list[tuple[str, Spans]]:
        """The texts of conversations, and which of their characters the template calls generated.

        Args:
          conversations: messages, and whether the text ends where the model's answer begins.
          tools: as in `render`.

        Raises:
          UsageError: the template refuses one.
        """
        requests = [
            {
                "messages": [_with_reasoning(message) for message in messages],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": answer,
                **self._special,
            }
            for messages, answer in conversations
        ]
        with self._errors():
            return self._template.render_all(requests)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered conversation, in which special tokens are what they spell."""
        return self.encode_marked(text, [])[0]

    def encode_marked(self, text: str, spans: Spans) -> tuple[list[int], list[bool]]:
        """The ids of a rendered conversation, and which of them hold a part of `spans`, in characters.

        A token may begin before: with the space that ends a header.
        """
        if self._library is not None:
            with library_errors(f"the tokenizer beside {self.file} cannot encode a text", WHOLE_FILES):
                encoding = self._library.encode(text, add_special_tokens=False)
            check_expansion(text, len(encoding), "chat's")
            held = [(begin, max(end, begin + 1)) for begin, end in encoding.offsets]
            return encoding.ids, [any(begin < last and first < end for first, last in spans) for begin, end in held]
        ids, marks, cuts = [], [], sorted({0, *(bound for span in spans for bound in span), len(text)})
        for begin, end in pairwise(cuts):
            marked, part = (begin, end) in spans, []
            for number, piece in enumerate(text[begin:end].split(EOD_PIECE)):
                part += [*[self._tokenizer.eod] * (number > 0), *(self._tokenizer.encode(piece) if piece else [])]
            ids, marks = ids + part, marks + [marked] * len(part)
        return ids, marks

    def special_end(self, text: str) -> str:
        """The special token that ends a text, or nothing."""
        added = {} if self._library is None else self._library.get_added_tokens_decoder()
        special = [EOD_PIECE] if self._library is None else [one.content for one in added.values() if one.special]
        return max((token for token in special if text.endswith(token)), key=len, default="")

    def end_id(self, text: str) -> int | None:
        """The id of the special token that ends a text, white space aside; None: no such token ends it."""
        end = self.special_end(text.rstrip())
        return self.encode(end)[-1] if end else None

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ids, with special tokens or without."""
        if self._library is not None:
            return self._library.decode(list(ids), skip_special_tokens=not special)
        return self._tokenizer.decode([token for token in ids if special or token != self._tokenizer.eod])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn whatever goes wrong in the template into one sentence."""
        try:
            yield
        except (OSError, ValueError) as error:
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
    """The message without empty values, and with its reasoning under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
