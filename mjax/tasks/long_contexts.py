"""Perplexity by position: does a model predict better the more it has read?

Long documents are cut into stretches of L tokens, each of which the model reads from position 1. Label p of a stretch
is predicted from the p tokens before it, so the mean loss at p over all stretches shows what p tokens of context are
worth. It falls with p as long as the model uses what lies further back; it levels off where the model no longer does,
and rises where positions are too many for it, such as beyond those of its training.

    stretch 0   [eod t1 … t_L−1] → t1 … t_L          the document from its beginning
    stretch 1   [t_L … t_2L−1] → t_L+1 … t_2L        and on from there; the rest, shorter than L, is left out

Every stretch has every position, so all bins are means over the same text, and comparable. That is why documents with
fewer than L tokens are left out, and counted. The standard error of a bin is that of the mean over stretches: the
labels within a stretch are not independent.

Source: the loss over positions of long documents, as in the Gemini 1.5 report (arXiv 2403.05530, section 5.2.1, figure
7), there cumulative; and sliding-window perplexity by length in YaRN (arXiv 2309.00071, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from mjax.config.model import ModelConfig
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.tasks.interface import Metric, Score, Window, overlapping_windows, perplexity
from mjax.tasks.zero_shot import open_text


class Positions:
    """The task on files of text, or on a dataset.

    Attributes:
      passes: the stretches of all documents, one list.
      length: L, labels of a stretch.
      edges: first position of each bin, from 1, and the end of the last [bins + 1].
      split: positions before they were scaled, or half the length: the metrics compare what is before and after.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, model: ModelConfig, length: int | None = None, bins: int = 16):
        """Read the documents and cut them into stretches.

        Args:
          data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
          tokenizer: of the model.
          model: config of the model.
          length: L, by default the model's sequence.
          bins: of positions, at most.

        Raises:
          UsageError: there is nothing under that name, no document is long enough, the dataset was made with another
            tokenizer, or the length is above the model's positions.
        """
        self.length = model.max_positions if length is None else length
        if not 2 <= self.length <= model.max_positions:
            problem = f"--positions.length {self.length} does not fit a model of {model.max_positions:,} positions"
            raise UsageError(f"{problem}; use 2 to {model.max_positions}")
        documents, _ = open_text(data, tokenizer)
        stretches: list[Window] = []
        self.documents = self.used = self.tokens = longest = 0
        for tokens in documents:
            windows = overlapping_windows(np.array([tokenizer.start, *tokens], np.int32), self.length, self.length)
            whole = [window for window in windows if window.counted == self.length]
            self.documents, self.used = self.documents + bool(len(tokens)), self.used + bool(whole)
            self.tokens, longest = self.tokens + len(tokens), max(longest, len(tokens))
            stretches += whole
        if not stretches:
            shorter = f", or use --positions.length {1 << longest.bit_length() - 1}" if longest > 1 else ""
            needs = f"{data} has no document of {self.length:,} tokens, the longest has {longest:,}"
            raise UsageError(f"{needs}; give longer texts{shorter}")
        self.passes: list[Sequence[Window]] = [stretches]
        self.edges = np.unique(np.round(np.geomspace(1, self.length + 1, bins + 1)).astype(np.int64))
        self.scaled = model.unscaled_sequence < self.length
        self.split = model.unscaled_sequence if self.scaled else self.length // 2

    def metrics(self, scores: Sequence[np.ndarray]) -> list[Metric]:
        """The loss before and after `split`, what was read, and the loss of every bin.

        Args:
          scores: the losses of all stretches, nats [stretches, L], in a list.

        Raises:
          RunError: a loss is not finite.
        """
        (losses,) = scores
        mean = Score(float(losses.sum(dtype=np.float64)), losses.size).mean
        bins = self.bins(losses)
        before, after = losses[:, : self.split].mean(1), losses[:, self.split :].mean(1)
        gain, error = mean_and_error(before - after)
        plus_minus = "" if error is None else f", ± {error:.4f}"
        left_out = self.tokens - losses.size
        return [
            Metric.number("loss", mean, "nats per token, all positions"),
            Metric.number("loss_before", mean_and_error(before)[0], f"positions 1 to {self.split:,}"),
            Metric.number("loss_after", mean_and_error(after)[0], f"positions {self.split + 1:,} to {self.length:,}"),
            Metric.number("gain", gain, f"of the later positions{plus_minus}; below 0 they are worse"),
            Metric("gain_error", error, "unknown" if error is None else f"{error:.4f}", "standard error of the gain"),
            Metric.count("documents", self.used, f"of {self.documents:,}; shorter ones are left out"),
            Metric.count("stretches", len(losses), f"of {self.length:,} tokens each"),
            Metric.count("tokens", losses.size, f"and {left_out:,} left out, of short documents and at the ends"),
            Metric("bins", bins, _table(bins)),
        ]

    def bins(self, losses: np.ndarray) -> list[dict[str, float | int | None]]:
        """The rows of the table: first and last position of each bin, its mean loss, and how many labels it has.

        Args:
          losses: nats [stretches, L].
        """
        rows = []
        for first, end in pairwise(self.edges.tolist()):
            mean, error = mean_and_error(losses[:, first - 1 : end - 1].mean(1, dtype=np.float64))
            rows.append(
                {"first": first, "last": end - 1, "loss": mean, "standard_error": error}
                | {"perplexity": perplexity(mean), "tokens": len(losses) * (end - first)}
            )
        return rows

    def draw(self, scores: Sequence[np.ndarray], file: Path, source: str) -> None:
        """Draw the loss of every bin into `file`, .png, .pdf or .svg; `source` is for the title."""
        from mjax.pictures.tasks import draw_positions  # matplotlib takes a second to import

        (losses,) = scores
        about = (
            f"{len(losses):,} stretches of {self.length:,} tokens from {self.used:,} of {self.documents:,} documents"
        )
        trained = self.split if self.scaled else None
        draw_positions(self.bins(losses), file, f"{source}\n{about}", trained)


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """The mean of independent values [n] and its standard error, None for a single value."""
    mean = float(values.mean(dtype=np.float64))
    return mean, float(values.std(ddof=1, dtype=np.float64) / math.sqrt(len(values))) if len(values) > 1 else None


def _table(rows: list[dict[str, float | int | None]]) -> Table:
    header = (Column(name, justify="right") for name in ("positions", "loss", "±", "perplexity", "tokens"))
    table = Table(*header, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        span = f"{row['first']:,}" if row["first"] == row["last"] else f"{row['first']:,} – {row['last']:,}"
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        table.add_row(span, f"{row['loss']:.4f}", error, f"{row['perplexity']:,.2f}", f"{row['tokens']:,}")
    return table
