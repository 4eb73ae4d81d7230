"""Text that appears while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

Decode = Callable[[list[int]], str]


def written_after(decode: Decode, prompt: list[int], tokens: list[int]) -> str:
    """The text of a continuation.

    It is decoded together with its prompt, because the text of a token can depend on the previous one: sentencepiece
    drops the space before the first, and a byte-level token may contain half a character.
    """
    return decode(prompt + tokens).removeprefix(decode(prompt))


class Streamed:
    """A continuation in the making. Its tokens may be heard several times, and in another order.

    Attributes:
      text: of the tokens so far, without an end that is not whole: a token may end within a character, which decodes
        to U+FFFD until the rest of it comes.
      ended: whether there are no more.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]):
        """`decode` gives the text of ids; `prompt` is what the continuation follows."""
        self._decode, self._prompt = decode, list(prompt)
        self._early: dict[int, int | None] = {}
        self._tokens: list[int] = []
        self.text, self.ended = "", False

    def hear(self, position: int, token: int | None) -> None:
        """Take the token drawn for a position; None: the text ends before it."""
        if self.ended:
            return
        self._early.setdefault(position - len(self._prompt), token)
        before = len(self._tokens)
        while not self.ended and len(self._tokens) in self._early:
            token = self._early.pop(len(self._tokens))
            self.ended = token is None
            self._tokens += [] if token is None else [token]
        if self.ended or len(self._tokens) > before:
            text = written_after(self._decode, self._prompt, self._tokens)
            text = text if self.ended else text.rstrip("\ufffd")
            if text.startswith(self.text):
                self.text = text


class Live:
    """Prints texts one after the other, each as it grows."""

    def __init__(self, console: Console, titles: Sequence[str]):
        """`titles` are printed before the texts, dim on a terminal, and an empty line between two texts."""
        self._console, self._titles = console, titles
        self._current, self._shown = 0, -1

    def show(self, texts: Sequence[Streamed]) -> None:
        """Print what is new."""
        while self._current < len(texts):
            streamed = texts[self._current]
            if self._shown < 0:
                title = self._titles[self._current]
                self._write(f"\x1b[2m{title}\x1b[0m" if self._console.is_terminal and title else title)
                self._shown = 0
            if len(streamed.text) > self._shown:
                self._write(streamed.text[self._shown :])
                self._shown = len(streamed.text)
            if not streamed.ended:
                return
            last = self._current == len(texts) - 1
            self._write("\n" if last else "\n\n")
            self._current, self._shown = self._current + 1, -1

    def _write(self, text: str) -> None:  # not by rich, which ends the process where the output is not read
        self._console.file.write(text)
        self._console.file.flush()
