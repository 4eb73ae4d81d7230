"""A progress bar for work on text, with documents and bytes per second."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TextColumn

from mjax.utils.progress import progress

Advance = Callable[[int, int, int], None]
"""Called with the bytes of input, documents and bytes of text done since the last call."""


@contextmanager
def showing(verb: str, size: int) -> Iterator[Advance]:
    """Show progress over `size` bytes of input, with the mean rates of documents and of text."""
    began, documents, text_bytes = time.perf_counter(), 0, 0
    with progress(verb, size, TextColumn("{task.description}")) as show:

        def advance(done: int, more_documents: int, more_text_bytes: int) -> None:
            nonlocal documents, text_bytes
            documents, text_bytes = documents + more_documents, text_bytes + more_text_bytes
            figures = speed(documents, text_bytes, time.perf_counter() - began)
            show(done, description=f"{documents:,} documents  {figures}")

        yield advance


def speed(documents: int, text_bytes: int, seconds: float) -> str:
    """'1,234 documents/s  5.6 MB/s'."""
    return f"{documents / seconds:,.0f} documents/s  {text_bytes / seconds / 1e6:.1f} MB/s"
