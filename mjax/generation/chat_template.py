"""A chat template in a process of its own, with bounds on its time, memory and output.

A template is a program from outside. Jinja's sandbox keeps it away from Python, but not from looping for hours or
writing gigabytes. So a child process renders it, with Jinja set up as `transformers` does (`apply_chat_template`), and
is ended when it takes too long. The child runs this file alone, which imports nothing of mjax.
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10.0
"""For the texts that are asked for together."""
MEMORY = 1 << 30
"""Bytes that the child may map; a template needs a tenth of them."""
MOST = 1 << 24
"""Characters of these texts."""
Rendered = tuple[str, list[tuple[int, int]]]


class TemplateError(ValueError):
    """Error that a template raises, or a problem of the template."""


class Template:
    """A chat template; the process that renders it starts with the first conversation."""

    def __init__(self, source: str):
        """Raises TemplateError if it is not a template."""
        self.source = source
        self._child: subprocess.Popen | None = None
        try:
            environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    @property
    def marks(self) -> bool:
        """True if the template may mark what the assistant writes, by {% generation %}."""
        return "generation" in self.source

    def render(self, **values: Any) -> Rendered:
        """The text of the template with these values, and where {% generation %} begins and ends; raises as
        `render_all`."""
        return self.render_all([values])[0]

    def render_all(self, requests: Sequence[dict[str, Any]]) -> list[Rendered]:
        """`render` of several values, which JSON can hold.

        Raises:
          TemplateError: it refuses them, or takes too much time, memory or room.
        """
        if self._child is None:
            command = [sys.executable, "-I", __file__]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._say(self.source)
            self._child.stdout.readline()  # it is ready
        try:
            self._say(list(requests))
            if not select.select([self._child.stdout], [], [], SECONDS)[0]:
                raise TemplateError(f"it is not done after {SECONDS:.0f} s")
            line = self._child.stdout.readline()
            if not line:
                raise TemplateError(f"it takes more than {MEMORY >> 20} MiB")
        except BaseException:
            self.close()
            raise
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return [(text, [tuple(span) for span in generated]) for text, generated in answer["texts"]]

    def close(self) -> None:
        """End the process; another conversation starts a new one."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    __del__ = close

    def _say(self, value: Any) -> None:
        self._child.stdin.write(json.dumps(value).encode() + b"\n")
        self._child.stdin.flush()


def serve() -> None:
    """In the child: read the template, then a list of values a line, and answer each with texts or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by the parent alone
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source, templates = json.loads(sys.stdin.readline()), []
    print(flush=True)
    for line in sys.stdin:
        try:
            templates = templates or [environment(marks).from_string(source) for marks in (("", ""), (BEGIN, END))]
            texts = []
            for values in json.loads(line):
                text = templates[0].render(**values)
                same, generated = without_marks(templates[1].render(**values)) if "generation" in source else (text, [])
                texts.append((text, generated if same == text else []))  # not if a filter cut into a mark
            answer = {"texts": texts}
            if sum(len(text) for text, _ in texts) > MOST:
                answer = {"error": f"it writes more than {MOST:,} characters"}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY >> 20} MiB"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print(json.dumps(answer), flush=True)


# --- Jinja, as transformers sets it up --------------------------------------------------------------------------------


BEGIN, END = (f"\ue000{secrets.token_hex(8)}{name}\ue001" for name in ("begin", "end"))
"""Marks that no text holds."""


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} around what the assistant writes: its content, between marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The content of the block."""
        line = next(parser.stream).lineno
        content = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        marks = [jinja2.nodes.TemplateData(mark) for mark in self.environment.generation_marks]
        begin, end = (jinja2.nodes.Output([mark], lineno=line) for mark in marks)
        return [begin, *content, end]


def without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
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
    """A namespace that keeps templates away from Python's internals."""

    def __init__(*args, **kwargs):
        self, *values = args
        given = dict(*values, **kwargs)
        for name in given:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name, value):
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template cannot set {name!r} of a namespace")


def environment(marks: tuple[str, str] = ("", "")) -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up: the filter `tojson`, the functions `raise_exception` and `strftime_now`.

    `marks` stand around what the assistant writes.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    environment.globals["namespace"] = _Namespace
    environment.extend(generation_marks=marks)
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.exceptions.TemplateError(message)


if __name__ == "__main__":
    serve()
