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
from dataclasses import dataclass
from itertools import chain, islice, pairwise, product
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from mjax.config.model import ModelConfig
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.tasks.interface import Metric, Score, Window, overlapping_windows, perplexity
from mjax.tasks.options import NeedleOptions, PositionsOptions
from mjax.tasks.zero_shot import open_text


class Positions:
    """The task on files of text, or on a dataset.

    Attributes:
      passes: the stretches of all documents, one list.
      length: L, labels of a stretch.
      edges: first position of each bin, from 1, and the end of the last [bins + 1].
      split: positions before they were scaled, or half the length: the metrics compare what is before and after.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, model: ModelConfig, options: PositionsOptions):
        """Read the documents and cut them into stretches.

        Args:
          data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
          tokenizer: of the model.
          model: config of the model.
          options: of the task.

        Raises:
          UsageError: there is nothing under that name, no document is long enough, the dataset was made with another
            tokenizer, or the length is above the model's positions.
        """
        self.length = model.max_positions if options.length is None else options.length
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
        self.edges = bin_edges(self.length, options.bins, options.spacing)
        self.spacing = options.spacing
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
        draw_positions(self.bins(losses), file, f"{source}\n{about}", trained, self.spacing == "log")


def bin_edges(length: int, bins: int, spacing: str) -> np.ndarray:
    """First positions of the bins, from 1, and length + 1: whole numbers that grow [at most bins + 1]."""
    spread = np.geomspace if spacing == "log" else np.linspace
    return np.unique(np.round(spread(1, length + 1, bins + 1)).astype(np.int64))


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """The mean of independent values [n] and its standard error, None for a single value."""
    mean = float(values.mean(dtype=np.float64))
    return mean, float(values.std(ddof=1, dtype=np.float64) / math.sqrt(len(values))) if len(values) > 1 else None


def _table(rows: list[dict[str, float | int | None]]) -> Table:
    table = right_aligned("positions", "loss", "±", "perplexity", "tokens")
    for row in rows:
        span = f"{row['first']:,}" if row["first"] == row["last"] else f"{row['first']:,} – {row['last']:,}"
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        table.add_row(span, f"{row['loss']:.4f}", error, f"{row['perplexity']:,.2f}", f"{row['tokens']:,}")
    return table


def right_aligned(*header: str) -> Table:
    """An empty table without lines."""
    return Table(*(Column(name, justify="right") for name in header), box=None, header_style="bold", pad_edge=False)


# --- The needle in a haystack: does a model find a sentence in a long text, wherever it is? ---------------------------
# A fact that nobody can guess is put into filler text, and asked for at the end:
#
#     eod │ filler … The magic number of Lisbon is 7421 and no other. … filler │ What is the magic number of Lisbon? The
#         0%              depth, share of the filler before the fact            │ magic number of Lisbon is → 7421
#
# The number counts as found if greedy decoding writes it, all of it. That is so exactly if each of its tokens is the
# most likely one given the true tokens before it, so one forward pass decides it, as in LAMBADA.
#
# The length is that of everything, answer included, and exact: the filler is cut to it. Every sample has a city, a
# number and a place in the text of its own, drawn from the seed; all depths of a length have the same, so that they
# differ in depth only. Within the filler the fact follows the end of a sentence, where there is one less than half a
# step of depth before its place.
#
# Source: Greg Kamradt, "Needle In A Haystack – Pressure Testing LLMs", 2023; one number of a city as in the Gemini 1.5
# report (arXiv 2403.05530, section 5.2.1.2).


FACT = " The magic number of {city} is {number} and no other."
"""The number is followed by a word: some tokenizers have tokens of a digit and a full stop."""
QUESTION = " What is the magic number of {city}? The magic number of {city} is"
ANSWER = " {number}"
CITIES = (
    *("Accra", "Athens", "Baku", "Berlin", "Bogota", "Cairo", "Dakar", "Delhi", "Doha", "Hanoi", "Havana", "Kyoto"),
    *("Lima", "Lisbon", "Madrid", "Minsk", "Nairobi", "Oslo", "Paris", "Porto", "Quito", "Riga", "Rome", "Seoul"),
    *("Sofia", "Tallinn", "Tunis", "Turin", "Vienna", "Zagreb"),
)  # fmt: skip
NUMBERS = 1000, 10_000
SENTENCE_ENDS = (".", "!", "?", "\n")
ENOUGH = 100
"""Times the longest text; what a larger file has beyond that is not read."""


@dataclass(frozen=True)
class _Sample:
    """The tokens of a fact, of the question for it and of the answer, and where in the text its filler begins."""

    fact: list[int]
    question: list[int]
    answer: list[int]
    begin: float

    @property
    def size(self) -> int:
        """Tokens besides the filler, the id that begins it included."""
        return 1 + len(self.fact) + len(self.question) + len(self.answer)


class Needle:
    """The task on files of text, or on a dataset, which are the filler.

    Attributes:
      lengths: tokens of the whole text, in ascending order.
      depths: shares of the filler before the fact, from 0 to 1.
      passes: the windows of each cell of the grid, lengths within depths: len(depths) · len(lengths) lists.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, model: ModelConfig, options: NeedleOptions):
        """Read the filler and hide the facts.

        Args:
          data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
          tokenizer: of the model.
          model: config of the model.
          options: of the task.

        Raises:
          UsageError: there is nothing under that name, or too little for the filler; a length is above the model's
            positions, or too short for the fact and the question.
        """
        self.options, self.unscaled = options, model.unscaled_sequence
        samples = [_draw(tokenizer, options.seed, number) for number in range(options.samples)]
        self.lengths = _lengths(options.lengths, model.max_positions, max(sample.size for sample in samples))
        self.depths = np.linspace(0, 1, options.depths)
        filler = _filler(data, tokenizer, ENOUGH * self.lengths[-1])
        if len(filler) < (needed := self.lengths[-1] - min(sample.size for sample in samples)):
            raise UsageError(
                f"{data} has {len(filler):,} tokens and a text of {self.lengths[-1]:,} needs {needed:,} of filler; "
                "give more text, or lower --needle.lengths"
            )
        ends = _sentence_ends(filler, tokenizer)
        self.passes: list[Sequence[Window]] = [
            [_window(sample, filler, ends, depth, length, options.depths, tokenizer.start) for sample in samples]
            for depth in self.depths
            for length in self.lengths
        ]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """The share of numbers that were found, and of every cell."""
        total = sum(scores, Score())
        numbers = f"{total.right:,} of {total.windows:,} numbers"
        rows = [
            {"depth": float(depth), "length": length, "found": score.right, "samples": score.windows}
            for (depth, length), score in zip(product(self.depths, self.lengths), scores, strict=True)
        ]
        return [
            Metric.share("found", total.right, total.windows, f"{numbers} are written by greedy decoding"),
            Metric.share(
                "correct_tokens", total.correct, total.labels, "of the numbers, each given the true ones before"
            ),
            Metric.number("loss", total.mean, "nats per token of the numbers"),
            Metric.count("samples", self.options.samples, f"in each cell, from seed {self.options.seed}"),
            Metric("cells", rows, self._table(self._shares(scores))),
        ]

    def draw(self, scores: Sequence[Score], file: Path, source: str) -> None:
        """Draw the share that was found, depth × length, into `file`, .png, .pdf or .svg; `source` is for the title."""
        from mjax.pictures.tasks import draw_needle  # matplotlib takes a second to import

        about = f"{source}\n{self.options.samples} numbers in each cell, seed {self.options.seed}"
        draw_needle(self._shares(scores), self.lengths, self.depths, file, about, self.unscaled)

    def _shares(self, scores: Sequence[Score]) -> np.ndarray:
        """The share that was found, [depths, lengths]."""
        shares = [score.right / score.windows for score in scores]
        return np.array(shares).reshape(len(self.depths), len(self.lengths))

    def _table(self, shares: np.ndarray) -> Table:
        table = right_aligned("depth", *(f"{length:,}" for length in self.lengths))
        for depth, row in zip(self.depths, shares, strict=True):
            table.add_row(f"{depth:.0%}", *(f"{share:.0%}" for share in row))
        return table


def _draw(tokenizer: Tokenizer, seed: int, number: int) -> _Sample:
    """Sample `number`, from the seed alone.

    The question is encoded with its answer, and the answer begins where the tokens of the question alone end: some
    tokenizers encode a number differently at the beginning of a text.
    """
    random = np.random.default_rng([seed, number])
    words = {"city": CITIES[random.integers(len(CITIES))], "number": int(random.integers(*NUMBERS))}
    alone = tokenizer.encode(QUESTION.format(**words))
    whole = tokenizer.encode((QUESTION + ANSWER).format(**words))
    common = next((i for i, pair in enumerate(zip(alone, whole, strict=False)) if pair[0] != pair[1]), len(alone))
    fact = tokenizer.encode(FACT.format(**words))
    return _Sample(list(fact), list(whole[:common]), list(whole[common:]), random.random())


def _lengths(given: tuple[int, ...], sequence: int, shortest: int) -> tuple[int, ...]:
    """The lengths in ascending order, by default those halvings of the sequence that have room for the texts."""
    lengths = tuple(sorted(set(given))) or tuple(
        sequence >> halvings for halvings in (3, 2, 1, 0) if sequence >> halvings >= 2 * shortest or not halvings
    )
    if lengths[-1] > sequence:
        raise UsageError(
            f"--needle.lengths {lengths[-1]} is longer than the model's sequence of {sequence:,} tokens; use "
            f"{sequence} at most, or convert the model with --rope to have more"
        )
    if lengths[0] < shortest:
        raise UsageError(
            f"a text of --needle.lengths {lengths[0]} tokens has no room for a fact and its question; use {shortest} "
            f"or more, of the model's {sequence:,}"
        )
    return lengths


def _filler(data: str, tokenizer: Tokenizer, most: int) -> np.ndarray:
    """The documents of a file one after the other, int32, at most `most` tokens."""
    documents, _ = open_text(data, tokenizer)
    return np.fromiter(islice(chain.from_iterable(documents), most), np.int32)


def _sentence_ends(filler: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The possible beginnings of a sentence: indices of the tokens after those that end one, ascending."""
    ids = [token for token in np.unique(filler).tolist() if tokenizer.decode([token]).endswith(SENTENCE_ENDS)]
    return np.flatnonzero(np.isin(filler, ids)) + 1


def _window(
    sample: _Sample, filler: np.ndarray, ends: np.ndarray, depth: float, length: int, depths: int, start: int
) -> Window:
    """A text of exactly `length` tokens, of which those of the answer count."""
    size = length - sample.size
    begin = int(sample.begin * (len(filler) - size + 1))
    begin_of_fact = round(depth * size)
    if begin_of_fact < size:  # at 100% the fact is the last thing before the question
        index = np.searchsorted(ends, begin + begin_of_fact, side="right") - 1
        moved = int(ends[index]) - begin if index >= 0 else 0
        if moved >= 0 and begin_of_fact - moved <= size / (2 * (depths - 1)):
            begin_of_fact = moved
    text = filler[begin : begin + size]
    parts = [[start], text[:begin_of_fact], sample.fact, text[begin_of_fact:], sample.question, sample.answer]
    return Window(np.concatenate(parts).astype(np.int32), len(sample.answer))
