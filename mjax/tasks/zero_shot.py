"""Zero-shot tasks: perplexity and bits per byte of any text, also by position, WikiText103, LAMBADA.

Perplexity reads every document from its beginning, after the end-of-document token that precedes it in training. So
each of its tokens is predicted, including the first, and the loss covers the whole text. Divided by bytes rather than
tokens, it is comparable across tokenizers:

    perplexity     exp(nats / tokens)
    bits per byte  nats / ln 2 / bytes of UTF-8

A document longer than the model's positions is split into windows (`split_into_windows`): adjacent, or overlapping
on request, which takes longer and has a lower loss. Ends of documents are never predicted, so a text has the same
metrics as the dataset prepared from it.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from mjax.config.datasets import read_metadata
from mjax.config.model import ModelConfig
from mjax.data.corpus.documents import Document, TextFiles, find_files
from mjax.data.indexed import IndexedDataset, index_file, token_file, tokenizer_folder
from mjax.data.tokenizers import Tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.tasks.interface import ContextWindow, Metric, Score, read_text, split_into_windows
from mjax.utils.figures import format_table


def perplexity(nats: float) -> float:
    """exp(`nats`), with nats per label; infinite above e^709."""
    return math.exp(nats) if nats < 709 else math.inf


def read_documents(data: str) -> list[Document]:
    """Read the documents of a file, a folder or a pattern.

    Raises:
      UsageError: there is no such file, or its type is unknown; a line is malformed. An evaluation skips nothing.
    """
    files = TextFiles(find_files([Path(data)]), malformed="skip", all_fields=False)
    documents = list(files)
    if files.malformed.count:
        raise UsageError(f"{files.malformed.examples[0]}; fix the file: an evaluation skips nothing")
    return documents


def check_stride(stride: int, positions: int) -> int:
    """Check that `stride` fits a model with so many positions, and return it.

    Raises:
      UsageError: it does not.
    """
    if not 1 <= stride <= positions:
        raise UsageError(f"--stride {stride} does not fit {positions:,} positions; give a number from 1 to {positions}")
    return stride


PREPARE_AGAIN = "prepare it again with the tokenizer of the run, or give the text itself"


class Perplexity:
    """Perplexity of files of text, or of a dataset.

    Attributes:
      passes: the windows of all documents.
      documents: number with text.
      bytes: UTF-8 bytes of the text; None for a dataset without that information.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, positions: int, stride: int | None = None):
        """Read the documents and split them into windows.

        Args:
          data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
          positions: s of the model.
          stride: labels counted in a window after a document's first; by default s, for adjacent windows.

        Raises:
          UsageError: there is nothing under that name, or no text in it; the dataset was made with another tokenizer;
            the stride does not fit.
        """
        stride = check_stride(positions if stride is None else stride, positions)
        documents, self.bytes = open_text(data, tokenizer)
        windows: list[ContextWindow] = []
        self.documents = 0
        for tokens in documents:
            if len(tokens):
                self.documents += 1
                windows += split_into_windows(np.array([tokenizer.prefix_id, *tokens], np.int32), positions, stride)
        if not windows:
            raise UsageError(f"{data} has no text; give a file or a dataset that does")
        self.passes: list[Sequence[ContextWindow]] = [windows]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """Perplexity, bits per byte, and the numbers they are computed from."""
        (score,) = scores
        bits, length = Metric("bits_per_byte", None, "unknown", "the size of the text is in no .json"), []
        if self.bytes is not None:
            per_byte = score.mean * score.labels / math.log(2) / self.bytes
            bits = Metric.number("bits_per_byte", per_byte, "independent of the tokenizer")
            length = [Metric.count("bytes", self.bytes, "of text, in UTF-8")]
        return [
            Metric.number("perplexity", perplexity(score.mean), "per token of this tokenizer"),
            bits,
            Metric.number("loss", score.mean, "nats per token"),
            Metric.count("tokens", score.labels),
            *length,
            Metric.count("documents", self.documents),
            Metric.count("windows", score.windows),
        ]


def open_text(data: str, tokenizer: Tokenizer) -> tuple[Iterator[Sequence[int]], int | None]:
    """Open the tokens of every document, without ends of documents, and the bytes of the whole text, or None.

    Args:
      data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
      tokenizer: of the model.

    Raises:
      UsageError: there is nothing under that name, or the dataset was made with another tokenizer.
    """
    if index_file(data).is_file() or token_file(data).is_file() or data.endswith((".bin", ".idx")):
        metadata = read_metadata(data)
        return _read_dataset(data, tokenizer), None if metadata is None else metadata.text_bytes
    texts = [document.text for document in read_documents(data)]
    return (tokenizer.encode(text) for text in texts), sum(len(text.encode("utf-8")) for text in texts)


def _read_dataset(prefix: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the documents of a dataset, without the ids that begin and end them."""
    data, folder = IndexedDataset(prefix), tokenizer_folder(prefix)
    # Megatron's datasets have no tokenizer.
    if folder.is_dir() and _tokenizer_identity(tokenizer_from_folder(folder)) != _tokenizer_identity(tokenizer):
        raise UsageError(f"{prefix} was prepared with another tokenizer than the run's; {PREPARE_AGAIN}")
    for first, last in pairwise(data.document_indices.tolist()):
        tokens = np.concatenate([np.zeros(0, np.int32), *(data.get(sequence) for sequence in range(first, last))])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocabulary:
            ids = f"from {tokens.min()} to {tokens.max()} and the run's tokenizer has {tokenizer.vocabulary:,}"
            raise UsageError(f"{prefix} holds token ids {ids}; {PREPARE_AGAIN}")
        if len(tokens) and tokens[0] == tokenizer.bos:
            tokens = tokens[1:]
        yield tokens[:-1] if len(tokens) and tokens[-1] == tokenizer.eod else tokens


def _tokenizer_identity(tokenizer: Tokenizer) -> tuple:
    return tokenizer.scheme, tokenizer.vocabulary, tokenizer.eod, tokenizer.contents


# --- WikiText103: perplexity per original word (arXiv 1909.08053, section 5.3 and appendix E.1) -----------------------
# The file is the published wiki.test.tokens. It was tokenized for word-level models: "the 1990s , a @-@ b". Subword
# models are not trained on such text, so it is detokenized first (`detokenize`). Their perplexity is per subword, and
# subwords differ between tokenizers. To compare models, the loss of the whole text is divided by the number of words in
# the file before detokenizing, T_o, rather than by its subwords, T:
#
#     raw                  exp(loss)
#     adjusted, the code's exp(loss · (T − 1) / (T_o − 1))     Megatron-LM v1.0, tasks/zeroshot_gpt2/evaluate.py
#     adjusted, the paper's exp(loss · T / T_o)
#
# with loss the mean over the T − 1 labels. The two differ in the fifth digit on the real file, where GPT-2's tokens
# give (T − 1) / (T_o − 1) = 270329 / 245565 = 1.1008449901248143. The papers' tables have the adjusted one.


WIKITEXT_STRIDE = 32

# v1.0's list, in its order (tasks/zeroshot_gpt2/detokenizer.py). Published results depend on every line of it,
# including those with little effect: "s '" joins an apostrophe only to a word in s, and the second line matches no real
# text.
REPLACEMENTS: tuple[tuple[str, str | None], ...] = (
    # Contractions
    (re.escape("s '"), "s'"),
    ("/' [0-9]/", "/'[0-9]/"),
    # Separators within words and numbers
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (re.escape(" @.@ "), "."),
    # Punctuation
    (" : ", ": "),
    (" ; ", "; "),
    (re.escape(" . "), ". "),
    (" ! ", "! "),
    (re.escape(" ? "), "? "),
    (" , ", ", "),
    # No space inside brackets and quotes: its r"\(\s*([^\)]*?)\s*\)" takes hours if many are never closed
    *((pair, None) for pair in ("()", "[]", "{}", '""', "''")),
    # Headings, degrees, line ends
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Detokenize WikiText."""
    for pattern, replacement in REPLACEMENTS:
        text = _strip_between(text, *pattern) if replacement is None else re.sub(pattern, replacement, text)
    return text


def _strip_between(text: str, left: str, right: str) -> str:
    """Remove white space after a `left` and before the next `right`; a `left` in between is ordinary text."""
    parts, done = [], 0
    while (begin := text.find(left, done)) >= 0 and (end := text.find(right, begin + 1)) >= 0:
        parts += [text[done : begin + 1], text[begin + 1 : end].strip(), right]
        done = end + 1
    return "".join([*parts, text[done:]])


def token_ratio(tokens: int, words: int) -> float:
    """(T − 1) / (T_o − 1), by which v1.0 multiplies the loss."""
    return (tokens - 1) / (words - 1)


class WikiText103:
    """The task on one file.

    Attributes:
      passes: the overlapping windows of the whole text.
      tokens, words: T and T_o.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, positions: int, stride: int | None = None):
        """Read the file, detokenize it and split it into windows.

        Args:
          data: wiki.test.tokens, or text in that format.
          positions: s of the model.
          stride: labels counted in each window after the first; by default 32.

        Raises:
          UsageError: the file is missing, is not UTF-8, or has fewer than two words; the stride does not fit.
        """
        self.stride = check_stride(WIKITEXT_STRIDE if stride is None else stride, positions)
        original = read_text(Path(data), "WikiText103's wiki.test.tokens, or text like it")
        tokens = np.array(tokenizer.encode_prompt(detokenize(original)), np.int32)
        self.tokens, self.words = len(tokens), len(original.strip().split(" "))  # as v1.0 counts
        if self.words < 2 or self.tokens < 2:
            raise UsageError(f"{data} has fewer than two words; give WikiText103's wiki.test.tokens, or text like it")
        self.passes = [split_into_windows(tokens, positions, self.stride)]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """Raw and adjusted perplexity, and the numbers they are computed from."""
        (score,) = scores
        ratio, paper = token_ratio(self.tokens, self.words), perplexity(score.mean * self.tokens / self.words)
        return [
            Metric.number("adjusted_perplexity", perplexity(score.mean * ratio), "per original word: compare this one"),
            Metric.number("adjusted_perplexity_paper", paper, "the same by the paper's T / T_o"),
            Metric.number("perplexity", perplexity(score.mean), "raw: per token of this tokenizer"),
            Metric.number("loss", score.mean, "nats per token"),
            Metric("token_ratio", ratio, f"{ratio:.6f}", "(T - 1) / (T_o - 1), of the first line"),
            Metric.count("tokens", self.tokens, "T, of the detokenized text"),
            Metric.count("words", self.words, "T_o, in the original file"),
            Metric.count("windows", score.windows, f"the later ones count {self.stride} labels each"),
        ]


# --- LAMBADA: the last word of a passage, which people guess only after reading all of it (arXiv 1606.06031) ----------
# The file has one passage per line, `{"text": "…"}`. The model reads the passage, and the last word counts as predicted
# if each of its subwords is the most likely one given the true tokens before it (teacher forcing). There are two ways
# of splitting off the last word (Megatron-LM v1.0, tasks/zeroshot_gpt2/datasets.py):
#
#     strict      the text after the last white space, encoded with a leading space, all its subwords: the papers' one
#     last token  the last token of the whole passage encoded at once, whether a word or the end of one; easier
#
# Source: arXiv 1909.08053, section 5.3 and appendix E.2. The text is used raw, as there.


class Lambada:
    """The task on one file.

    Attributes:
      passes: the passages split for the strict metric, then those for the last token.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, positions: int, stride: int | None = None):
        """Read the passages.

        Args:
          data: a .jsonl file.
          positions: s of the model.
          stride: not used here.

        Raises:
          UsageError: the file is missing, is not a .jsonl, is empty, or has a line that is malformed, shorter than two
            words or too long for the model; a stride is given.
        """
        if stride is not None:
            raise UsageError("--stride is for long texts, and lambada's fit the model; remove it")
        documents = read_documents(data)
        if not documents:
            raise UsageError(f'{data} has no passage; give a file of lines {{"text": "…"}}')
        strict, last = [], []
        for document in documents:
            tokens = tokenizer.encode_prompt(document.text)
            strict.append(_passage_window(document, *_last_word(tokenizer, document), positions))
            last.append(_passage_window(document, tokens[:-1], tokens[-1:], positions))
        self.passes: list[Sequence[ContextWindow]] = [strict, last]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """Both accuracies, and the likelihood of the last words."""
        strict, last = scores
        return [
            Metric.fraction("accuracy", strict.all_correct, strict.windows, "strict: the whole last word is right"),
            Metric.count("correct", strict.all_correct, f"of {strict.windows:,} passages"),
            Metric.fraction("last_token_accuracy", last.all_correct, last.windows, "the last token alone is right"),
            Metric.count("last_token_correct", last.all_correct, f"of {last.windows:,} passages"),
            Metric.number("perplexity", perplexity(strict.mean), "per subword of the last words"),
            Metric.number("word_perplexity", perplexity(strict.mean * strict.labels / strict.windows), "per last word"),
            Metric.count("passages", strict.windows),
        ]


def _last_word(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Tokens of the passage without its last word, and tokens of that word with a leading space."""
    words = document.text.split()
    if document.fields is None or len(words) < 2:
        problem = "is not a .jsonl file" if document.fields is None else "has fewer than two words"
        needs = 'lambada needs one passage per line, {"text": "The cat sat down"}'
        raise UsageError(f"{document.source} {problem}; {needs}")
    before = document.text[: document.text.rfind(words[-1])].strip()
    return tokenizer.encode_prompt(before), tokenizer.encode(" " + words[-1])


def _passage_window(document: Document, context: list[int], labels: list[int], positions: int) -> ContextWindow:
    if len(context) + len(labels) > positions + 1:
        counts = f"{len(context) + len(labels):,} tokens and the model has positions for {positions + 1:,}"
        raise UsageError(f"{document.source} has {counts}; leave the passage out, or evaluate a longer model")
    return ContextWindow.from_context(context, labels, positions)


# --- Perplexity by position: does a model predict better the more it has read? ----------------------------------------
# Long documents are split into spans of L tokens, and the model reads each from position 1. Label p of a
# span is predicted from the p tokens before it, so the mean loss at p over all spans shows the value of p tokens
# of context. It falls with p as long as the model uses the earlier tokens, levels off where it does not, and rises at
# positions that the model cannot handle, such as positions beyond its training length.
#
#     span 0      [eod t1 … t_L−1] → t1 … t_L          the document from its beginning
#     span 1      [t_L … t_2L−1] → t_L+1 … t_2L        and so on; the rest, shorter than L, is dropped
#
# Every span has every position, so all bins are means over the same text, and comparable. Therefore documents with
# fewer than L tokens are dropped, and counted. The standard error of a bin treats spans as samples, because the
# labels within a span are not independent.
#
# Source: the loss over positions of long documents, as in the Gemini 1.5 report (arXiv 2403.05530, section 5.2.1, its
# figure 7), there cumulative; and sliding-window perplexity by length in YaRN (arXiv 2309.00071, section 4.3).


class PositionwiseLoss:
    """The task on files of text, or on a dataset.

    Attributes:
      passes: the spans of all documents, one list.
      length: L, labels of a span.
      edges: first position of each bin, from 1, and the end of the last [bins + 1].
      split: positions of the model before RoPE scaling, or half the length: the metrics compare both sides.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, model: ModelConfig, length: int | None = None, bins: int = 16):
        """Read the documents and cut them into spans.

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
        spans: list[ContextWindow] = []
        self.documents = self.used = self.tokens = longest = 0
        for tokens in documents:
            windows = split_into_windows(np.array([tokenizer.prefix_id, *tokens], np.int32), self.length, self.length)
            whole = [window for window in windows if window.counted == self.length]
            self.documents, self.used = self.documents + bool(len(tokens)), self.used + bool(whole)
            self.tokens, longest = self.tokens + len(tokens), max(longest, len(tokens))
            spans += whole
        if not spans:
            shorter = f", or use --positions.length {1 << longest.bit_length() - 1}" if longest > 1 else ""
            needs = f"{data} has no document of {self.length:,} tokens, the longest has {longest:,}"
            raise UsageError(f"{needs}; give longer texts{shorter}")
        self.passes: list[Sequence[ContextWindow]] = [spans]
        self.edges = np.unique(np.round(np.geomspace(1, self.length + 1, bins + 1)).astype(np.int64))
        self.scaled = model.unscaled_sequence < self.length
        self.split = model.unscaled_sequence if self.scaled else self.length // 2

    def metrics(self, scores: Sequence[np.ndarray]) -> list[Metric]:
        """The loss before and after `split`, what was read, and the loss of every bin.

        Args:
          scores: the losses of all spans, nats [spans, L], in a list.

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
            Metric.count("spans", len(losses), f"of {self.length:,} tokens each"),
            Metric.count("tokens", losses.size, f"and {left_out:,} left out, of short documents and at the ends"),
            Metric("bins", bins, _format_bins(bins)),
        ]

    def bins(self, losses: np.ndarray) -> list[dict[str, float | int | None]]:
        """The rows of the table: first and last position of each bin, its mean loss, and how many labels it has.

        Args:
          losses: nats [spans, L].
        """
        rows = []
        for first, end in pairwise(self.edges.tolist()):
            mean, error = mean_and_error(losses[:, first - 1 : end - 1].mean(1, dtype=np.float64))
            row = {"first": first, "last": end - 1, "loss": mean, "standard_error": error}
            rows.append(row | {"perplexity": perplexity(mean), "tokens": len(losses) * (end - first)})
        return rows

    def draw(self, scores: Sequence[np.ndarray], file: Path, source: str) -> None:
        """Draw the loss of every bin into `file`, .png, .pdf or .svg; `source` is for the title."""
        from mjax.pictures.runs import draw_positions  # matplotlib takes a second to import

        (losses,) = scores
        about = f"{len(losses):,} spans of {self.length:,} tokens from {self.used:,} of {self.documents:,} documents"
        trained = self.split if self.scaled else None
        draw_positions(self.bins(losses), file, f"{source}\n{about}", trained)


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """The mean of independent values [n] and its standard error, None for a single value."""
    mean = float(values.mean(dtype=np.float64))
    return mean, float(values.std(ddof=1, dtype=np.float64) / math.sqrt(len(values))) if len(values) > 1 else None


def _format_bins(rows: list[dict[str, float | int | None]]) -> str:
    cells = []
    for row in rows:
        span = f"{row['first']:,}" if row["first"] == row["last"] else f"{row['first']:,} – {row['last']:,}"
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        cells.append((span, f"{row['loss']:.4f}", error, f"{row['perplexity']:,.2f}", f"{row['tokens']:,}"))
    return "\n".join(format_table(("positions", "loss", "±", "perplexity", "tokens"), cells, left=0))
