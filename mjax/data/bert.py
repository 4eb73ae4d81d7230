"""BERT's samples: two segments of text with some tokens hidden, and whether the segments are in order.

    sentences of a document      a b c | d e                       cut at a random place into two segments
    in order, or exchanged       a b c | d e   or   d e | a b c    half of the samples each
    cut to the target length     the longer one loses tokens at its front or its end, at random
    tokens                       [CLS] a b c [SEP] d e [SEP] [PAD] [PAD]
    token types                    0   0 0 0   0   1 1   1     0     0
    documents                      0   0 0 0   0   0 0   0     1     1      attention stays within a number
    hidden                       [CLS] a b c [SEP] [MASK] e [SEP] [PAD] [PAD]

The model predicts the hidden tokens and the order of the segments, which 1909.08053, §4.2 takes from ALBERT
(Lan et al. 2020) in place of BERT's next-sentence prediction.

Sample i depends on the data, the seed and i alone: it has a separate generator, seeded with (seed + i) mod 2^32. It is
Megatron's sample i, token for token, with two exceptions:

- Any padding id works. Megatron fills its padding mask and its token types with that id, so both are wrong unless it is
  0, and treats every token of that id as padding, even one that masking inserted.
- An id in the middle of a sample stays. Megatron replaces the padding id by 0 everywhere.

Source: Megatron-LM, core/datasets/bert_dataset.py.

**Sentences.** A sample is a run of whole sentences of one document, in Megatron's order.

Sentences of a document are added to a sample until it reaches its target length; the next sample begins with the next
sentence. Two rules keep the ends useful: a sample that will be cut into two segments has at least two sentences, and a
single sentence is never left over, so the last sample of a document may be much longer than its target, and is cut when
it is read.

    sentences  | 30 tokens | 25 | 40 | 18 | 31 | 22 |         wanted: 60
    samples    |── 0 ─────────────────|── 1 ────────|         after 55 tokens one more; after 1 only one would be left

The target is usually the longest that fits, s − 3 next to [CLS], [SEP] and [SEP]. With a probability of about 10% it is
shorter, from 2 tokens up, because fine-tuning often sees short inputs (google-research/bert,
create_pretraining_data.py). One random word decides both whether a sample is short and its length, so with s of 512 and
one in ten short only even lengths occur. Each epoch draws new ones. All samples of all epochs are shuffled together.
Documents with fewer sentences than a sample needs are skipped, and so are documents of several sentences with one
longer than 512 tokens.

Every target depends on the number of draws before it, so the walk is a loop, but over samples rather than sentences:
the end of a sample is looked up among the running totals of tokens.

Given the same files, documents, seed and number of samples the result is that of Megatron's C++, row for row.

Source: Megatron-LM, core/datasets/helpers.cpp (build_mapping).

**Masking.** Masked language modelling hides tokens that BERT must predict.

About 15% of the tokens are hidden, in spans of one to three whole words. A word is a WordPiece and the "##" pieces that
follow it:

    tokens   [CLS]  the  un ##believ ##able  cat  sat  [SEP]
    words            0   1  1        1        2    3

Words are visited in random order. At each the length n of a span is drawn, shorter ones more often: P(n) ∝ 1/n, that is
55%, 27% and 18%. The span covers that word and the next n − 1; if it would hide too many tokens, it loses words from
its end until it fits, and if the first word alone is too long, or part of the span is hidden already, it is skipped. Of
the tokens in a span 80% become [MASK], 10% a random token and 10% stay, each drawn separately, so that the model
cannot see which tokens it has to predict. [CLS] and [SEP] are never hidden.

The draws are Megatron's, in their order, on the given generator, so masks are Megatron's token for token. Options that
pretrain_bert.py leaves off are absent: pieces instead of words, spans that are long rather than short or of a geometric
distribution (SpanBERT's), and exchanged tokens (StructBERT's), which draws on NumPy's global generator and so cannot be
repeated.

Source: Devlin et al. 2019, §3.1; 1909.08053, §4.2; Megatron-LM, core/datasets/masked_dataset.py and bert_dataset.py.
"""

import hashlib
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mjax.data.cache import NO_CACHE, IndexCache
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import check_ids
from mjax.data.tokenizers import BertTokenizer
from mjax.errors import UsageError

# --- Masked language modelling ----------------------------------------------------------------------------------------

PROBABILITY = 0.15  # share of tokens that are hidden, at least one
MAX_SPAN_WORDS = 3  # words of a span
SHARES = 1 / np.arange(1, MAX_SPAN_WORDS + 1)
SHARES /= SHARES.sum()
UP_TO = SHARES.cumsum()
UP_TO = (UP_TO / UP_TO[-1]).tolist()  # probability of a span of at most 1, 2, 3 words, as `RandomState.choice` sums it
MASKED, REPLACED = 0.8, 0.5  # share that becomes [MASK], and of the rest the share that becomes a random token


@dataclass(frozen=True)
class WordPieces:
    """Parts of a vocabulary that masking needs: its special ids, and the ids that continue a word."""

    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray
    """True for "##" pieces, bool [vocabulary]."""

    @classmethod
    def from_tokenizer(cls, tokenizer: BertTokenizer) -> "WordPieces":
        """The parts of a tokenizer's vocabulary."""
        continues = np.zeros(tokenizer.vocabulary, bool)
        continues[[number for piece, number in tokenizer.library.get_vocab().items() if piece.startswith("##")]] = True
        return cls(tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad, continues)


def find_words(tokens: np.ndarray, pieces: WordPieces) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens that may be hidden, and where among them each word begins and the last one ends.

    The pieces of word w are at `positions[bounds[w] : bounds[w + 1]]`. As in Megatron, a segment that lost the
    beginning of a word continues the last word of the segment before.

    Args:
      tokens: [n], [CLS] and [SEP] included.

    Returns:
      positions [tokens but [CLS] and [SEP]], bounds [words + 1].
    """
    positions = np.flatnonzero((tokens != pieces.cls) & (tokens != pieces.sep))
    begins = ~pieces.continues[tokens[positions]]
    begins[:1] = True
    return positions, np.append(np.flatnonzero(begins), len(positions))


def create_masked_lm_predictions(
    tokens: np.ndarray, wanted: int, pieces: WordPieces, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Hide some tokens of a sample.

    Args:
      tokens: the sample, int32 [n], [CLS] and [SEP] included.
      wanted: target length; at most PROBABILITY of it are hidden, even in a longer sample.
      pieces: of the vocabulary.
      random: drawn from.

    Returns:
      The tokens as the model sees them, int32 [n], and whether each is to be predicted, bool [n].
    """
    most = int(min(PROBABILITY * wanted, max(1, round(len(tokens) * PROBABILITY))))
    positions, bounds = (array.tolist() for array in find_words(tokens, pieces))
    words = len(bounds) - 1
    seen, hidden = tokens.copy(), set()
    for word in random.permutation(words).tolist():
        if len(hidden) >= most:
            break
        end = min(word + 1 + bisect_right(UP_TO, random.random_sample()), words)
        first, last = bounds[word], bounds[end]
        while end > word and len(hidden) + last - first > most:
            end -= 1
            last = bounds[end]
        span = positions[first:last]  # of no token where the first word alone is too much
        if not hidden.isdisjoint(span):
            continue
        hidden.update(span)
        for position in span:
            if random.random_sample() < MASKED:
                seen[position] = pieces.mask
            elif random.random_sample() >= REPLACED:
                seen[position] = random.randint(0, len(pieces.continues))
    guessed = np.zeros(len(tokens), bool)
    guessed[list(hidden)] = True
    return seen, guessed


# --- The sentences of each sample -------------------------------------------------------------------------------------

LONG_SENTENCE = 512  # tokens; a document of several sentences with a longer one is skipped
SHORT = 10  # one sample in so many has a shorter target
MIN_SENTENCES = 2  # sentences of a sample, which is cut into two segments
PIECE = 2**16  # documents, or draws, in memory as Python numbers at a time


def build_pair_index(
    lengths: np.ndarray, boundaries: np.ndarray, samples: int | None, most: int, seed: int
) -> np.ndarray:
    """Sentences of each sample and its target, (first sentence, one after the last, tokens), [rows, 3].

    Epochs are whole, so there may be more rows than samples asked for; none if no document is usable.

    Args:
      lengths: tokens in each sentence of the dataset, int32 [S].
      boundaries: sentence with which each document to draw from begins, and the end of the last, int64 [documents + 1].
      samples: minimum number of rows; None: one epoch.
      most: target of a sample that is not short, in tokens, 2 or more.
      seed: determines lengths and order.

    Returns:
      uint32, or uint64 in a dataset of 2^32 sentences and more.
    """
    wanted = _target_lengths(seed, most)
    dtype = np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    parts, rows = [np.empty((0, 3), dtype)], 0
    while True:
        before = rows
        for first in range(0, len(boundaries) - 1, PIECE):
            piece = _walk(lengths, boundaries[first : first + PIECE + 1], wanted)
            parts.append(piece.astype(dtype))
            rows += len(piece)
        if samples is None or rows >= samples or rows == before:
            break
    return np.concatenate(parts)[_shuffle_rows(rows, seed + 1)]


def _target_lengths(seed: int, most: int) -> Iterator[int]:
    """Targets of successive samples, in tokens, from the words of `std::mt19937(seed)`."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        words = random.randint(2**32, size=PIECE, dtype=np.uint32)  # the generator's words as they are
        yield from np.where(words % SHORT == 0, 2 + words % (most - 1), most).tolist()


def _walk(lengths: np.ndarray, boundaries: np.ndarray, wanted: Iterator[int]) -> np.ndarray:
    """The samples of some documents in the order of the file, [rows, 3]."""
    origin = int(boundaries[0])
    begins, ends = boundaries[:-1] - origin, boundaries[1:] - origin  # [documents]
    sizes = lengths[origin : int(boundaries[-1])]
    before = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]  # [sentences + 1], tokens before each
    sentences = ends - begins

    long_before = np.concatenate([[0], np.cumsum(sizes > LONG_SENTENCE)])
    useful = (sentences >= MIN_SENTENCES) & (long_before[ends] == long_before[begins])

    starts, stops, targets = [], [], []
    for sentence, last in zip(begins[useful].tolist(), ends[useful].tolist(), strict=True):
        while sentence < last:
            tokens = next(wanted)
            stop = bisect_left(before, before[sentence] + tokens, sentence + MIN_SENTENCES, last - 1)
            if stop > last - 2:  # one sentence would be left, or none
                stop = last
            starts.append(sentence)
            stops.append(stop)
            targets.append(tokens)
            sentence = stop
        next(wanted)  # Megatron draws one more at the end of a document
    rows = np.array([starts, stops, targets], np.int64).T
    rows[:, :2] += origin
    return rows


def _shuffle_rows(rows: int, seed: int) -> np.ndarray:
    """Row numbers as Fisher and Yates leave them, row i exchanged with row `word % (i + 1)`, i falling; int64 [rows].

    Many exchanges are one operation on arrays. That is correct if no row is in two of them, which is nearly always so
    for an eighth of the square root of the remaining rows; otherwise they are made one by one.
    """
    order = np.arange(rows)
    words = mersenne_twister_64(seed, rows)[: rows - 1]  # for the last row, the one before it, … and row 1
    partner = np.zeros(rows, np.int64)
    partner[1:] = words[::-1] % (order[1:] + 1).astype(np.uint64)
    stop = rows
    while stop > 1:
        first = stop - max(1, math.isqrt(stop) // 8)
        others = partner[first:stop]
        if others.max() < first and len(np.unique(others)) == len(others):
            order[first:stop], order[others] = order[others], order[first:stop].copy()
        else:
            for i in range(stop - 1, first - 1, -1):
                order[i], order[partner[i]] = order[partner[i]], order[i]
        stop = first
    return order


# --- The 64-bit Mersenne Twister of the C++ standard library ----------------------------------------------------------

STATE, LAG = 312, 156  # words the recurrence looks back, and words it computes at once
LOWER = 2**31 - 1
UPPER = 2**64 - 1 - LOWER
TWIST = 0xB5026F5AA96619E9


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """The first `count` words of `std::mt19937_64(seed)`, uint64 [count]; NumPy has the generator only in 32 bits.

    Words follow the recurrence

        x[k + 312] = x[k + 156] ⊕ A(upper 33 bits of x[k], lower 31 bits of x[k + 1])

    and are given out tempered. A word depends on none of the 155 before it, so 156 at a time are one operation on
    arrays.

    Source: Matsumoto and Nishimura, mt19937-64.c (2004); C++11, 26.5.3.2, whose 26.5.5 names the 10,000th word.
    """
    words = np.empty(STATE + count, np.uint64)
    word = seed % 2**64
    for i in range(STATE):
        words[i] = word
        word = (6364136223846793005 * (word ^ (word >> 62)) + i + 1) % 2**64
    for first in range(STATE, len(words), LAG):
        new = words[first : first + LAG]
        before, after = words[first - STATE :][: len(new)], words[first - STATE + 1 :][: len(new)]
        np.bitwise_xor(((before & UPPER) | (after & LOWER)) >> 1, (after & 1) * TWIST, out=new)
        new ^= words[first - LAG :][: len(new)]
    tempered = words[STATE:]
    tempered ^= (tempered >> 29) & 0x5555555555555555
    tempered ^= (tempered << 17) & 0x71D67FFFEDA60000
    tempered ^= (tempered << 37) & 0xFFF7EEE000000000
    tempered ^= tempered >> 43
    return tempered


# --- The dataset ------------------------------------------------------------------------------------------------------

SPECIAL = 3  # [CLS] and two [SEP]
_of_thread = threading.local()


class BertDataset:
    """Samples of up to `sequence` tokens in Megatron's order, from a dataset whose sequences are sentences.

    Epochs are whole, so `len()` may exceed the `samples` asked for.

    Args:
      indexed: the sentences, as `mjax prepare --split-sentences --no-append-eod` writes them.
      documents: documents to draw from, as `split_sequences(split, indexed.documents)` gives them.
      samples: minimum number of samples; None: one epoch.
      sequence: s, 5 or more.
      seed: determines the order and all random choices.
      pieces: the vocabulary.
      name: name of this part in errors.
      cache: keeps the index on disk.

    Raises:
      UsageError: no document makes a sample, or `sequence` is too short.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        samples: int | None,
        sequence: int,
        seed: int,
        pieces: WordPieces,
        name: str = "training part",
        *,
        cache: IndexCache = NO_CACHE,
    ):
        if sequence < SPECIAL + 2:
            raise UsageError(f"--model.sequence {sequence} leaves no room for a pair; use {SPECIAL + 2} or more")
        self.indexed, self.sequence, self.seed, self.pieces = indexed, sequence, seed, pieces
        boundaries = indexed.document_indices[documents.start : documents.stop + 1]

        def build() -> dict[str, np.ndarray]:
            lengths = indexed.lengths.copy()  # aligned, which those in the file are not
            index = build_pair_index(lengths, boundaries, samples, sequence - SPECIAL, seed)
            return {"pair_index": index}

        drawn = hashlib.sha256(boundaries).hexdigest()
        source = {"kind": "sentence pairs", "lengths": indexed.fingerprint, "documents": drawn, "samples": samples}
        source |= {"sequence": sequence, "seed": seed, "short": 1 / SHORT}
        self.pair_index = cache.arrays(source, ["pair_index"], build)["pair_index"]
        if not len(self.pair_index):
            what = f"no document of {MIN_SENTENCES} or more sentences, none of them above {LONG_SENTENCE} tokens"
            fix = "prepare the text with --split-sentences, or change --data.split"
            raise UsageError(f"the {name} of {indexed.prefix} has {what}; {fix}")

    def __len__(self) -> int:
        return len(self.pair_index)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`.

        Returns:
          "tokens" int32 [s], as the model sees them; "token_types" int32 [s], 1 in the second segment; "labels" int32
          [s], what is hidden, 0 elsewhere; "loss_mask" bool [s], where something is hidden; "documents" int32 [s], 1
          for padding; "sentence_order" int32 [], 1 where the segments are exchanged.

        Raises:
          IndexError: there is no such sample.
          UsageError: it holds an id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.indexed.prefix}, whose order was drawn for {len(self)}")
        first, last, wanted = self.pair_index[index].tolist()
        random = _generator((self.seed + index) % 2**32)

        pivot = first + (1 if last - first == 2 else random.randint(1, last - first))
        exchanged = random.random_sample() < 0.5
        segments = [self._sentences(first, pivot, index), self._sentences(pivot, last, index)]
        if exchanged:
            segments.reverse()
        one, two = _truncate(*segments, wanted, random)

        special = np.array([self.pieces.cls, self.pieces.sep], np.int32)
        second = [two, special[1:]] if len(two) else []
        tokens = np.concatenate([special[:1], one, special[1:], *second])
        seen, hidden = create_masked_lm_predictions(tokens, wanted, self.pieces, random)

        n, padding = len(tokens), self.sequence - len(tokens)
        sample = {
            "tokens": np.pad(seen, (0, padding), constant_values=self.pieces.pad),
            "token_types": np.zeros(self.sequence, np.int32),
            "labels": np.pad(np.where(hidden, tokens, 0), (0, padding)),
            "loss_mask": np.pad(hidden, (0, padding)),
            "documents": np.zeros(self.sequence, np.int32),
            "sentence_order": np.array(exchanged, np.int32),
        }
        sample["token_types"][len(one) + 2 : n] = 1
        sample["documents"][n:] = 1
        return sample

    def _sentences(self, first: int, last: int, index: int) -> np.ndarray:
        """Tokens of sentences `first` to `last`, int32 [n]."""
        tokens = self.indexed.join(np.arange(first, last), 0, int(self.indexed.lengths[last - 1]))
        check_ids(tokens, len(self.pieces.continues), f"sample {index} of {self.indexed.prefix}", "its tokenizer's")
        return tokens.astype(np.int32)


def _generator(seed: int) -> np.random.RandomState:
    """This thread's generator, reseeded: a new one would take as long as the rest of a sample."""
    if not hasattr(_of_thread, "random"):
        _of_thread.random = np.random.RandomState()
    _of_thread.random.seed(seed)
    return _of_thread.random


def _truncate(
    one: np.ndarray, two: np.ndarray, wanted: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Cut both segments to `wanted` tokens in total, one at a time off the longer one, or the second if equal."""
    bounds = [[0, len(one)], [0, len(two)]]
    excess = max(0, len(one) + len(two) - wanted)
    for draw in random.random_sample(excess).tolist():
        (begin, end), (begin_two, end_two) = bounds
        segment = bounds[0] if end - begin > end_two - begin_two else bounds[1]
        if draw < 0.5:
            segment[0] += 1
        else:
            segment[1] -= 1
    return one[slice(*bounds[0])], two[slice(*bounds[1])]
