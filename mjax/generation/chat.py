"""Conversations as text, by the chat template that a model brings along, and as token ids to continue or train on.

A chat template is a Jinja program in `RUN/tokenizer/chat_template.jinja`, which `chat_template.py` renders. A model
without one can be taught `PLAIN`.

A model is trained on the turns of the assistant, from after its header to the token that ends it. Questions, tool
results and headers are context. Two sources define the place of a turn:

    {% generation %}    in the template, if it has it
    prefixes            else: turn k is what rendering the first k messages adds to rendering those before it with
                        the header of an answer

Prefixes only agree if a template renders a message in the same way whatever follows. A template that leaves the
reasoning out of earlier turns does not: train on the last turn then. An empty `<think></think>`, which some templates
put before an answer, is never trained (it would teach the model not to think), nor is a `<think>` that the header of an
answer already opens.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.text import Text

from mjax.data import tokenizers
from mjax.data.tokenizer_trial import check_expansion
from mjax.errors import UsageError, split_lines
from mjax.utils.files import parse_json

TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARK = "(here the answer continues)"
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
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
OPENED = re.compile(r"<think>\s*\Z")
EMPTY = re.compile(r"(?:<think>|\A)\s*</think>\n*")
THOUGHT = re.compile(r"(?:<think>.*?|\A(?:(?!<think>).)*?)</think>\n*", re.DOTALL)
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles by their names in files of ShareGPT; the others have the names that they have here."""
SHOWN = 300  # characters of a conversation in an error
FORM = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
Span = tuple[int, int]
Spans = list[Span]
Message = dict[str, Any]
Messages = Sequence[Message]


class Chat:
    """The chat template of a run, its special tokens, and the ids that end a turn.

    Attributes:
      stops: ids that end the answer of the model.
      marks: whether the template may mark the assistant's text, by {% generation %}.
    """

    def __init__(self, folder: Path, tokenizer: tokenizers.Tokenizer | None = None, flag: str = "--chat"):
        """Read the template of a tokenizer's folder.

        Args:
          folder: of the tokenizer, such as RUN/tokenizer.
          tokenizer: whose end of document ends an answer too; by default the folder's tokenizer.
          flag: that asked for it, for messages.

        Raises:
          UsageError: there is no template, or one of the files is damaged.
        """
        self.file = folder / TEMPLATE
        if not self.file.is_file():
            fix = f"remove it, put the model's {TEMPLATE} there, or teach the model to chat with `mjax sft`"
            raise UsageError(f"{flag}: {folder} has no chat template; {fix}")
        source = self.file.read_bytes().decode("utf-8", errors="replace")
        self.marks = "generation" in source
        self._tokenizer = tokenizer or tokenizers.tokenizer_from_folder(folder)
        self._library, library, file = None, folder / "tokenizer.json", folder / "tokenizer_config.json"
        settings = tokenizers.read_optional_json(file)
        tokens = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
        if library.is_file():
            self._library = tokenizers.open_backend(library.read_bytes(), str(library))
            self._library.no_truncation()
            self._library.no_padding()
            self._ends = [one.content for one in self._library.get_added_tokens_decoder().values() if one.special]
        elif tokens or "bos_token" in source:
            fix = "convert the model again from a folder that has its tokenizer.json"
            raise UsageError(f"{flag} needs the tokens of {self.file} from {library}; {fix}")
        else:
            tokens, self._ends = {"eos_token": tokenizers.EOD_PIECE}, [tokenizers.EOD_PIECE]
        self._special = {
            name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
        }
        for name, token in self._special.items():
            if not isinstance(token, str):
                raise UsageError(f"{file}: {name} is {tokens[name]!r}, not a token; restore the file")
        end = self._library and self._library.token_to_id(self._special.get("eos_token", ""))
        self.stops = sorted({*tokenizers.stop_token_ids(folder, self._tokenizer.eod), end} - {None})
        from mjax.generation.chat_template import Template  # with Jinja, which no --help needs

        with self._errors():
            self._template = Template(source)

    def render(self, messages: Messages, tools: list | None = None, goes_on: bool = False) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Args:
          messages: of the conversation.
          tools: that the model may call.
          goes_on: whether the last message is the beginning of the answer, and the text ends with it.

        Raises:
          UsageError: the template rejects it.
        """
        if goes_on:
            last = {**messages[-1], "content": f"{messages[-1].get('content')}{MARK}"}
            return self.render_with_spans([([*messages[:-1], last], False)], tools)[0][0].rpartition(MARK)[0]
        return self.render_with_spans([(messages, True)], tools)[0][0]

    def render_with_spans(
        self, conversations: Sequence[tuple[Messages, bool]], tools: list | None
    ) -> list[tuple[str, Spans]]:
        """The texts of conversations, and which of their characters the template calls generated.

        Args:
          conversations: messages, and whether the text ends where the model's answer begins.
          tools: as in `render`.

        Raises:
          UsageError: the template rejects one.
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
            return self._template.render(requests)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered conversation; special tokens are encoded as such."""
        return self.encode_marked(text, [])[0]

    def encode_marked(self, text: str, spans: Spans) -> tuple[list[int], list[bool]]:
        """The ids of a rendered conversation, and which of them hold a part of `spans`, in characters.

        A token may begin before: with the space that ends a header.
        """
        if self._library is not None:
            problem = f"the tokenizer of {self.file} cannot encode a text"
            with tokenizers.convert_errors(problem, tokenizers.FETCH_AGAIN):
                encoding = self._library.encode(text, add_special_tokens=False)
            check_expansion(text, len(encoding), "chat's")
            held = [(begin, max(end, begin + 1)) for begin, end in encoding.offsets]
            return encoding.ids, [any(begin < last and first < end for first, last in spans) for begin, end in held]
        ids, marks, cuts = [], [], sorted({0, *(bound for span in spans for bound in span), len(text)})
        for begin, end in pairwise(cuts):
            marked, part = (begin, end) in spans, []
            for number, piece in enumerate(text[begin:end].split(tokenizers.EOD_PIECE)):
                part += [*[self._tokenizer.eod] * (number > 0), *(self._tokenizer.encode(piece) if piece else [])]
            ids, marks = ids + part, marks + [marked] * len(part)
        return ids, marks

    def special_end(self, text: str) -> str:
        """The special token that ends a text, or nothing."""
        return max(filter(text.endswith, self._ends), key=len, default="")

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
            problem = f"rejects the conversation or is damaged ({error})"
            raise UsageError(f"the chat template {self.file} {problem}; change the messages, or restore it") from None


def read_conversations(text: str) -> list[tuple[list[Message], list | None]]:
    """Conversations in JSON, with their tools: one, or one a line; each a list of messages, or as for `read_messages`.

    Raises:
      UsageError: it is not JSON, or not a conversation.
    """
    fix = 'write [{"role": "user", "content": "…"}], or one such list on each line'
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError):
        lines = [line for line in split_lines(text) if line.strip()]
        values = [parse_json(line, f"line {number} of stdin", fix) for number, line in enumerate(lines, start=1)]
    conversations = []
    for value in values:
        try:
            conversations.append(read_messages(value if isinstance(value, dict) else {"messages": value}))
        except ChatError as error:
            raise UsageError(f"stdin has JSON that is not a conversation: {error}; {fix}") from None
    return conversations


def _with_reasoning(message: Message) -> Message:
    """The message without empty values, and with its reasoning under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


# --- Conversations of a file ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The part of a conversation that is trained.

    Attributes:
      turns: all turns of the assistant, or the last.
      reasoning: whether its reasoning is trained, too.
      max_length: tokens that a conversation may have; None: any number.
      overflow: whether a longer one is dropped or truncated.
    """

    turns: Literal["all", "last"] = "all"
    reasoning: bool = True
    max_length: int | None = None
    overflow: Literal["drop", "truncate"] = "drop"


class ChatError(Exception):
    """The reason why JSON is not a conversation, or cannot be trained on."""


class Encoded(NamedTuple):
    """A conversation as ids.

    Attributes:
      ids: of its tokens.
      trained: whether each is trained.
      text_bytes: of its text in UTF-8.
      cut: whether its end is missing.
      stops: id of the special token that ends the last turn of the assistant, by which the model learns to stop; None:
        it ends with text, or is cut.
    """

    ids: list[int]
    trained: list[bool]
    text_bytes: int
    cut: bool
    stops: int | None


def read_messages(fields: dict[str, Any]) -> tuple[list[Message], list | None]:
    """The messages and tools of a JSON object or a row.

    It has "messages", "prompt" and "completion", "conversations" of "from" and "value" as ShareGPT, or as Alpaca
    "instruction", "output" and perhaps "input", which follows the instruction on a new line. The last two may have
    "system".

    Raises:
      ChatError: it has neither, or messages without a role or with content that is not text.
    """
    tools = _read_tools(fields.get("tools"))
    if fields.get("messages") is not None:
        messages = fields["messages"]
    elif fields.get("prompt") is not None and fields.get("completion") is not None:
        messages = []
        for role, part in (("user", fields["prompt"]), ("assistant", fields["completion"])):
            messages += part if isinstance(part, list) else [{"role": role, "content": part}]
    elif isinstance(fields.get("conversations"), list):
        messages = [*_system(fields), *map(_from_sharegpt, fields["conversations"])]
    elif fields.get("instruction") is not None and fields.get("output") is not None:
        messages = [*_system(fields), *_read_instruction(fields)]
    else:
        known = "messages, prompt and completion, conversations, or instruction and output"
        raise ChatError(f"it has no {known}, only {', '.join(fields) or 'nothing'}")
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages is not a list of them")
    return [_message(message) for message in messages], tools


def _read_tools(tools: Any) -> list | None:
    if isinstance(tools, str):  # as datasets store them, whose columns have one type
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"tools is not JSON ({error})") from None
    if not isinstance(tools, list | None):
        raise ChatError("tools is not a list")
    return tools or None


def _read_instruction(fields: dict[str, Any]) -> list[Message]:
    """The instruction and the output of Alpaca as messages."""
    if fields.get("history"):
        raise ChatError("it has a history of earlier turns, which is not read with an instruction; write messages")
    asked = [fields[name] for name in ("instruction", "input") if fields.get(name)]
    if not all(isinstance(part, str) for part in asked):
        raise ChatError("its instruction or input is not text")
    return [{"role": "user", "content": "\n".join(asked)}, {"role": "assistant", "content": fields["output"]}]


def _system(fields: dict[str, Any]) -> list[Message]:
    return [{"role": "system", "content": fields["system"]}] if fields.get("system") else []


def _from_sharegpt(turn: Any) -> Any:
    """A message of a file of ShareGPT, if it is one, with the names of its fields here."""
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        return turn
    names = {"from": "role", "value": "content"}
    message = {names.get(name, name): value for name, value in turn.items()}
    return message | {"role": SPEAKERS.get(turn["from"], turn["from"])}


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise ChatError(f"a message is {shorten(message, 60)}, without a role")
    if role not in ROLES:
        raise ChatError(f"a message has the role {role!r}; the roles are {', '.join(ROLES)}")
    if message.get("weight") not in (None, 0, 1):
        raise ChatError(f"the weight of a message is {message['weight']!r:.60}; it is 0 (not trained) or 1")
    content = message.get("content")
    if isinstance(content, list):
        if other := [part for part in content if not isinstance(part, dict) or not isinstance(part.get("text"), str)]:
            raise ChatError(f"a message holds {shorten(other[0], 60)}, which is not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise ChatError(f"the content of a message is {content!r:.60}, which is not text")
    return {name: value for name, value in {**message, "content": content}.items() if value is not None}


# --- What is trained --------------------------------------------------------------------------------------------------


def find_trained_spans(chat: Chat, messages: Messages, tools: list | None, trained: Trained) -> tuple[str, Spans]:
    """The text of a conversation, and the characters of it that are trained, in order.

    Raises:
      ChatError: it has no turn of the assistant, or its template renders that differently without what
        follows.
      UsageError: the template rejects it.
    """
    turns, answers = _list_turns(messages, trained)
    around = [(messages[: number + after], not after) for number in answers for after in (0, 1)]
    asked = around[-2:-1] if chat.marks else around
    (text, generated), *prefixes = chat.render_with_spans([(messages, False), *asked], tools)
    if chat.marks and not generated:
        prefixes = chat.render_with_spans(around, tools)
    texts = [rendered for rendered, _ in prefixes]
    header = texts[-2:][0]  # with all before the last answer
    if len(generated) == len(turns):
        spans = [span for span, number in zip(generated, turns, strict=True) if number in answers]
    elif generated:
        _check_weights(messages, turns, generated)
        begin = _begin(header, answers[-1], text, last=True) if trained.turns == "last" else 0
        spans = [span for span in generated if span[1] > begin]
    else:
        renderings = zip(texts[::2], texts[1::2], answers, strict=True)
        spans = [_turn(chat, *rendering, text, rendering[-1] == answers[-1]) for rendering in renderings]
    if OPENED.search(header) and trained.reasoning and _reasoning(messages[answers[-1]]) not in text:
        missing = f"the reasoning of message {answers[-1] + 1}, which it asks the model for"
        fix = "give one that writes it (--chat-template FILE), or train on the answers alone (--no-reasoning)"
        raise ChatError(f"the chat template leaves out {missing}; {fix}")
    written = [[messages[number]] for number in answers] if len(answers) == len(spans) else [messages] * len(spans)
    return text, list(_remove_untrained(text, spans, written, trained.reasoning))


def _list_turns(messages: Messages, trained: Trained) -> tuple[list[int], list[int]]:
    """The numbers of the assistant's messages, and of those that are trained."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ChatError("it has no turn of the assistant")
    answers = turns[-1:] if trained.turns == "last" else turns
    answers = [number for number in answers if messages[number].get("weight") != 0]
    if not answers:
        raise ChatError("the weight of each turn to train is 0")
    return turns, answers


def _check_weights(messages: Messages, turns: Sequence[int], generated: Spans) -> None:
    if any(messages[number].get("weight") == 0 for number in turns):
        marks = f"{len(generated)} parts of {len(turns)} turns of the assistant, so that those of weight 0 are unknown"
        fix = "give a template that marks each turn: --chat-template FILE"
        raise ChatError(f"the chat template marks {marks}; {fix}")


def _begin(before: str, number: int, text: str, last: bool) -> int:
    """The first character of the turn `messages[number]`, from the text `before` it with the header of an answer.

    A header may open reasoning for an answer that has none when it is rendered.
    """
    for header in (before, OPENED.sub("", before)):
        if text.startswith(header):
            return len(header)
    raise ChatError(_disagrees(number, last))


def _turn(chat: Chat, before: str, through: str, number: int, text: str, last: bool) -> Span:
    """Return the first and the last character of the turn `messages[number]` in the text of all of them.

    Args:
      chat: knows its special tokens.
      before: the text of the messages before it, with the header of an answer.
      through: the text of these messages and of this one.
      number: of the message.
      text: of all messages.
      last: whether no other turn of the assistant follows.
    """
    begin = _begin(before, number, text, last)
    turn = through[begin:]
    if not text.startswith(turn, begin):
        turn = EMPTY.sub("", turn, count=1)  # put before the last answer only
    alone = turn.removesuffix(chat.special_end(turn))
    if not text.startswith(turn, begin) and chat.special_end(alone.rstrip()):
        turn = alone  # the other token is put at the end of a text only
    if not turn or not text.startswith(turn, begin):
        raise ChatError(_disagrees(number, last))
    whole = turn.rstrip()
    # The model stops at the token that ends its turn: a line break after it is not part of the turn.
    return begin, begin + len(whole if chat.special_end(whole) else turn)


def _disagrees(number: int, last: bool) -> str:
    where, fix = "if other messages follow", "train on the last turn only: --train-on last"
    if last:
        where, fix = "without its header", "give a template that marks it by {% generation %}: --chat-template FILE"
    return (
        f"the chat template renders message {number + 1} differently {where}, so that the text of the assistant is "
        f"unknown; {fix}"
    )


def _reasoning(message: Message) -> str:
    """The reasoning of a message; empty if it has none."""
    inline = THOUGHT.search(message.get("content") or "")
    values = [*(message.get(name) for name in REASONING), inline and re.sub(r"</?think>", "", inline.group())]
    return next((value.strip() for value in values if isinstance(value, str)), "")


def _remove_untrained(text: str, spans: Spans, written: list[Messages], reasoning: bool) -> Iterator[Span]:
    """Remove untrained text from the `spans`; each span renders the messages in `written`."""
    for (begin, end), messages in zip(spans, written, strict=True):
        first, last = _span_without_loss(text[begin:end], messages, reasoning)
        yield from (part for part in ((begin, begin + first), (begin + last, end)) if part[0] < part[1])


def _span_without_loss(turn: str, messages: Messages, reasoning: bool) -> Span:
    """The part of a turn, which renders one of `messages`, that is not trained; it may be empty."""
    if match := (EMPTY if reasoning else THOUGHT).search(turn):
        return match.span()
    for message in () if reasoning else messages:  # in a separate channel
        if (thought := _reasoning(message)) and (begin := turn.find(thought)) >= 0:
            end, answer = begin + len(thought), (message.get("content") or "").strip()
            return 0, max(turn.find(answer, end), end) if answer else end
    return 0, 0


# --- As ids -----------------------------------------------------------------------------------------------------------


def encode(chat: Chat, fields: dict[str, Any], trained: Trained) -> Encoded | None:
    """A conversation as ids; None if it is too long, and dropped.

    Args:
      chat: template and tokenizer.
      fields: a JSON object or a row, as for `read_messages`.
      trained: the trained part of it.

    Raises:
      ChatError: it cannot be trained on, or the template rejects it.
    """
    messages, tools = read_messages(fields)
    try:
        text, spans = find_trained_spans(chat, messages, tools, trained)
        size = len(tokenizers.encode_utf8(text))
    except UsageError as error:
        raise ChatError(str(error)) from None
    ids, marks = chat.encode_marked(text, spans)
    if not any(marks[1:]):  # nothing predicts the first
        raise ChatError("none of its tokens are trained")
    if all(marks):
        raise ChatError("all of its tokens would be trained, those of the user, too; does the template mark them?")
    most = trained.max_length or len(ids)
    cut = len(ids) > most
    if cut and (trained.overflow == "drop" or not any(marks[1:most])):
        return None
    end = "" if cut else chat.special_end(text[: spans[-1][1]].rstrip())
    return Encoded(ids[:most], marks[:most], size, cut, chat.encode(end)[-1] if end else None)


def shorten(fields: Any, most: int = SHOWN) -> str:
    """The beginning of a conversation or a part of it, for an error."""
    text = json.dumps(fields, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= most else f"{text[:most]}…"


def preview(chat: Chat, encoded: Encoded) -> Text:
    """A conversation as it is trained: trained text green, other text dim, special tokens spelled out."""
    text, before, end = Text(), "", 0
    for trained, tokens in groupby(encoded.trained):
        end += len(list(tokens))
        decoded = chat.decode(encoded.ids[:end], special=True)
        text.append(decoded[len(before) :], "bold green" if trained else "dim")
        before = decoded
    return text


def refusal(source: str, error: ChatError, fields: dict[str, Any]) -> UsageError:
    """The error for the conversation at `source`."""
    return UsageError(f"{source}: {error} ({shorten(fields)}); write {FORM}, or skip such lines with --malformed skip")
