"""A chat template in a child process, with bounds on its time, memory and output.

A template is a program from outside. Jinja's sandbox denies it access to Python, but lets it loop for hours or write
gigabytes. So a child process renders it (`mjax/utils/child.py`), with Jinja set up as `transformers` does
(`apply_chat_template`).
"""

import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mjax.data.tokenizer_trial import MAX_TEMPLATE_CHARACTERS
from mjax.utils.child import Child, ChildError

SECONDS = 10.0  # of processor time, for the texts that are asked for together
MEMORY = 1 << 30  # bytes that the child may map; a template needs a tenth of them
MAX_RENDERED_CHARACTERS = 4 * MAX_TEMPLATE_CHARACTERS
"""Characters of these texts; each has at most LONGEST, and only one of them is encoded."""
Rendered = tuple[str, list[tuple[int, int]]]


class Template(Child):
    """A chat template; the process that renders it starts with the first conversation."""

    def __init__(self, source: str):
        """Raises ChildError if `source` is not a template."""
        super().__init__(f"{__name__}:render_texts", SECONDS, MEMORY)
        self.source = source
        try:
            environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChildError(f"{type(error).__name__}: {error}") from None

    def render(self, requests: Sequence[dict[str, Any]]) -> list[Rendered]:
        """The text with each of these values, which JSON can hold, and where in it {% generation %} begins and ends.

        Raises:
          ChildError: the template rejects them, or takes too much time, memory or room.
        """
        return self.ask(json.dumps([self.source, *requests]).encode())


def render_texts(question: bytes) -> list[Rendered]:
    """Render the texts of a template with values, from a list of its source and the values in JSON; runs in the child.

    Raises:
      ChildError: the template rejects them, or writes too much.
    """
    source, *requests = json.loads(question)
    texts = []
    try:
        plain, marked = _templates(source)
        for values in requests:
            text = plain.render(**values)
            same, generated = remove_marks(marked.render(**values)) if "generation" in source else (text, [])
            texts.append((text, generated if same == text else []))  # not if a filter cut into a mark
    except MemoryError:
        raise
    except Exception as error:
        raise ChildError(f"{type(error).__name__}: {error}"[:1000]) from None
    if max((len(text) for text, _ in texts), default=0) > MAX_TEMPLATE_CHARACTERS:
        raise ChildError(f"it writes more than {MAX_TEMPLATE_CHARACTERS:,} characters in a text")
    if sum(len(text) for text, _ in texts) > MAX_RENDERED_CHARACTERS:
        raise ChildError(f"it writes more than {MAX_RENDERED_CHARACTERS:,} characters")
    return texts


@cache
def _templates(source: str) -> list[jinja2.Template]:
    """The template without marks and with them."""
    return [environment(marks).from_string(source) for marks in (("", ""), (BEGIN, END))]


# --- Jinja, as transformers sets it up --------------------------------------------------------------------------------


BEGIN, END = (f"\ue000{secrets.token_hex(8)}{name}\ue001" for name in ("begin", "end"))  # marks that no text holds


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} around the assistant's text: its content, between marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The content of the block."""
        line = next(parser.stream).lineno
        content = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        marks = [jinja2.nodes.TemplateData(mark) for mark in self.environment.generation_marks]
        begin, end = (jinja2.nodes.Output([mark], lineno=line) for mark in marks)
        return [begin, *content, end]


def remove_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where in it the content of each marked block begins and ends."""
    plain, spans, begin = "", [], 0
    for part in re.split(f"({BEGIN}|{END})", text):
        if part == BEGIN:
            begin = len(plain)
        elif part == END:
            spans.append((begin, len(plain)))
        else:
            plain += part
    return plain, spans


class _Namespace(jinja2.utils.Namespace):
    """A namespace without access to Python's internals."""

    def __init__(*args, **kwargs):
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template cannot set the namespace attribute {name!r}")


def environment(marks: tuple[str, str] = ("", "")) -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up: the filter `tojson`, the functions `raise_exception` and `strftime_now`.

    `marks` stand around the assistant's text.
    """
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    env.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    env.globals["namespace"] = _Namespace
    env.extend(generation_marks=marks)
    return env


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON without HTML escapes, which Jinja's filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.exceptions.TemplateError(message)
