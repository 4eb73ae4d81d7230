"""BERT's samples: two segments of text with masked tokens, and whether the segments are in order.

    sentences of a document      a b c | d e                       split at a random sentence into two segments
    in order, or swapped         a b c | d e   or   d e | a b c    half of the samples each
    truncated to the target      the longer segment loses tokens at its front or its end, at random
    tokens                       [CLS] a b c [SEP] d e [SEP] [PAD] [PAD]
    token types                    0   0 0 0   0   1 1   1     0     0
    documents                      0   0 0 0   0   0 0   0     1     1      attention stays within a number
    masked                       [CLS] a b c [SEP] [MASK] e [SEP] [PAD] [PAD]

The model predicts the masked tokens and the order of the segments, which 1909.08053, §4.2 takes from ALBERT
(Lan et al. 2020) in place of BERT's next-sentence prediction.

Sample i depends on the data, the seed and i alone: it has a separate generator, seeded with (seed + i) mod 2^32. It is
Megatron's sample i, token for token, with two exceptions:

- Any padding id works. Megatron fills its padding mask and its token types with that id, so both are wrong unless it is
  0, and treats every token of that id as padding, even one that masking inserted.
- An id in the middle of a sample stays. Megatron replaces the padding id by 0 everywhere.

Source: Megatron-LM, core/datasets/bert_dataset.py.

**Sentences.** A sample is a run of whole sentences of one document, in Megatron's order.

Sentences of a document are added to a sample until it reaches its target length; the next sample begins with the next
sentence. A sample has at least two sentences, because it is split into two segments. A single sentence is never left
over, so the last sample of a document may be much longer than its target, and is truncated when it is read.

    sentences  | 30 tokens | 25 | 40 | 18 | 31 | 22 |         target: 60
    samples    |── 0 ─────────────────|── 1 ────────|         after 55 tokens one more; after 1 only one would be left

The target is usually the longest that fits, s − 3 next to [CLS], [SEP] and [SEP]. With a probability of about 10% it is
shorter, from 2 tokens up, because fine-tuning often sees short inputs (google-research/bert,
create_pretraining_data.py). One random word decides both whether a sample is short and its length, so with s of 512 and
one in ten short only even lengths occur. Each epoch draws new ones. All samples of all epochs are shuffled together.
Documents with fewer sentences than a sample needs are skipped, as well as documents of several sentences with one
longer than 512 tokens.

Every target depends on the number of draws before it, so the walk is a loop. It runs over samples rather than
sentences: the end of a sample is looked up among the running totals of tokens.

Given the same files, documents, seed and number of samples the result equals Megatron's C++ code, row for row.

Source: Megatron-LM, core/datasets/helpers.cpp (build_mapping).

**Masking.** Masked language modeling replaces tokens that BERT must predict.

About 15% of the tokens are masked, in spans of one to three whole words. A word is a WordPiece and the "##" pieces that
follow it:

    tokens   [CLS]  the  un ##believ ##able  cat  sat  [SEP]
    words            0   1  1        1        2    3

Words are visited in random order. At each the length n of a span is drawn, shorter ones more often: P(n) ∝ 1/n, that is
55%, 27% and 18%. The span covers that word and the next n − 1. If it would mask too many tokens, it loses words from
its end until it fits. If the first word alone is too long, or part of the span is masked already, it is skipped. Of the
tokens in a span 80% become [MASK], 10% a random token and 10% stay. Each is drawn separately, so that the model cannot
see which tokens it has to predict. [CLS] and [SEP] are never masked.

The draws are Megatron's, in their order, on the given generator, so masks are Megatron's token for token. Options that
pretrain_bert.py leaves off are absent: pieces instead of words, spans with longer or geometrically distributed lengths
(SpanBERT's), and permuted tokens (StructBERT's). The last use NumPy's global generator and cannot be reproduced.

Source: Devlin et al. 2019, §3.1; 1909.08053, §4.2; Megatron-LM, core/datasets/masked_dataset.py and bert_dataset.py.
"""

import hashlib
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mjax.data.cache import Arrays
from mjax.data.samples import SplitDataset, check_sample_ids
from mjax.data.tokenizers import BertTokenizer
from mjax.errors import UsageError

# --- Masked language modeling -----------------------------------------------------------------------------------------

MLM_PROBABILITY = 0.15  # share of tokens that are masked, at least one
MAX_SPAN_WORDS = 3  # words of a span
SPAN_PROBABILITIES = 1 / np.arange(1, MAX_SPAN_WORDS + 1)
SPAN_PROBABILITIES /= SPAN_PROBABILITIES.sum()
SPAN_CDF = SPAN_PROBABILITIES.cumsum()
SPAN_CDF = (SPAN_CDF / SPAN_CDF[-1]).tolist()  # of at most 1, 2, 3 words, summed as in `RandomState.choice`
MASK_TOKEN_PROBABILITY, KEEP_TOKEN_PROBABILITY = 0.8, 0.5  # [MASK]; else the token itself; else a random token


@dataclass(frozen=True)
class WordPieceVocabulary:
    """Ids of a vocabulary that masking needs: the special ones, and the pieces that continue a word.

    Attributes:
      is_continuation: True for "##" pieces, bool [vocabulary].
    """

    cls: int
    sep: int
    mask: int
    pad: int
    is_continuation: np.ndarray

    @classmethod
    def from_tokenizer(cls, tokenizer: BertTokenizer) -> "WordPieceVocabulary":
        """The vocabulary of a tokenizer."""
        is_continuation, ids = np.zeros(tokenizer.vocabulary, bool), tokenizer.backend.get_vocab()
        is_continuation[[number for piece, number in ids.items() if piece.startswith("##")]] = True
        return cls(tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad, is_continuation)


def find_word_bounds(tokens: np.ndarray, pieces: WordPieceVocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens that may be masked, and where among them each word begins and the last one ends.

    The pieces of word w are at `positions[bounds[w] : bounds[w + 1]]`. As in Megatron, a segment that lost the
    beginning of a word continues the last word of the segment before.

    Args:
      tokens: [n], [CLS] and [SEP] included.

    Returns:
      positions [tokens but [CLS] and [SEP]], bounds [words + 1].
    """
    positions = np.flatnonzero((tokens != pieces.cls) & (tokens != pieces.sep))
    begins = ~pieces.is_continuation[tokens[positions]]
    begins[:1] = True
    return positions, np.append(np.flatnonzero(begins), len(positions))


def create_masked_lm_predictions(
    tokens: np.ndarray, target_length: int, pieces: WordPieceVocabulary, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Mask some tokens of a sample.

    Args:
      tokens: the sample, int32 [n], [CLS] and [SEP] included.
      target_length: of the sample; at most MLM_PROBABILITY of it are masked, even in a longer sample.
      pieces: the vocabulary.
      random: generator of all draws.

    Returns:
      The tokens as the model sees them, int32 [n], and whether each is to be predicted, bool [n].
    """
    max_predictions = int(min(MLM_PROBABILITY * target_length, max(1, round(len(tokens) * MLM_PROBABILITY))))
    positions, bounds = (array.tolist() for array in find_word_bounds(tokens, pieces))
    words = len(bounds) - 1
    masked_tokens, masked = tokens.copy(), set()
    for word in random.permutation(words).tolist():
        if len(masked) >= max_predictions:
            break
        end = min(word + 1 + bisect_right(SPAN_CDF, random.random_sample()), words)
        first, last = bounds[word], bounds[end]
        while end > word and len(masked) + last - first > max_predictions:
            end -= 1
            last = bounds[end]
        span = positions[first:last]  # empty if the first word alone is too long
        if not masked.isdisjoint(span):
            continue
        masked.update(span)
        for position in span:
            if random.random_sample() < MASK_TOKEN_PROBABILITY:
                masked_tokens[position] = pieces.mask
            elif random.random_sample() >= KEEP_TOKEN_PROBABILITY:
                masked_tokens[position] = random.randint(0, len(pieces.is_continuation))
    is_masked = np.zeros(len(tokens), bool)
    is_masked[list(masked)] = True
    return masked_tokens, is_masked


# --- The sentences of each sample -------------------------------------------------------------------------------------

MAX_SENTENCE_TOKENS = 512  # tokens; a document of several sentences with a longer one is skipped
SHORT_SEQ_RATIO = 10  # one sample in so many has a shorter target
MIN_SENTENCES = 2  # sentences of a sample, which is cut into two segments
CHUNK_SIZE = 2**16  # documents, or draws, in memory as Python numbers at a time


def build_pair_index(
    lengths: np.ndarray, boundaries: np.ndarray, samples: int | None, max_tokens: int, seed: int
) -> np.ndarray:
    """Sentences of each sample and its target, (first sentence, one after the last, tokens), [rows, 3].

    Epochs are whole, so there may be more rows than samples asked for; none if no document is usable.

    Args:
      lengths: tokens in each sentence of the dataset, int32 [S].
      boundaries: sentence with which each document to draw from begins, and the end of the last, int64 [documents + 1].
      samples: minimum number of rows; None: one epoch.
      max_tokens: target length of a sample that is not short, 2 or more.
      seed: determines lengths and order.

    Returns:
      uint32, or uint64 in a dataset of 2^32 sentences and more.
    """
    targets = _draw_target_lengths(seed, max_tokens)
    dtype = np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    chunks, rows = [np.empty((0, 3), dtype)], 0
    while True:
        before = rows
        for first in range(0, len(boundaries) - 1, CHUNK_SIZE):
            chunk = _group_sentences(lengths, boundaries[first : first + CHUNK_SIZE + 1], targets)
            chunks.append(chunk.astype(dtype))
            rows += len(chunk)
        if samples is None or rows >= samples or rows == before:
            break
    return np.concatenate(chunks)[_draw_permutation(rows, seed + 1)]


def _draw_target_lengths(seed: int, max_tokens: int) -> Iterator[int]:
    """Targets of successive samples, in tokens, from the words of `std::mt19937(seed)`."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        words = random.randint(2**32, size=CHUNK_SIZE, dtype=np.uint32)  # the generator's raw words
        yield from np.where(words % SHORT_SEQ_RATIO == 0, 2 + words % (max_tokens - 1), max_tokens).tolist()


def _group_sentences(lengths: np.ndarray, boundaries: np.ndarray, target_lengths: Iterator[int]) -> np.ndarray:
    """The samples of some documents in the order of the file, [rows, 3]."""
    origin = int(boundaries[0])
    begins, ends = boundaries[:-1] - origin, boundaries[1:] - origin  # [documents]
    sizes = lengths[origin : int(boundaries[-1])]
    before = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]  # [sentences + 1], tokens before each
    sentences = ends - begins

    long_before = np.concatenate([[0], np.cumsum(sizes > MAX_SENTENCE_TOKENS)])
    usable = (sentences >= MIN_SENTENCES) & (long_before[ends] == long_before[begins])

    rows = []
    for sentence, last in zip(begins[usable].tolist(), ends[usable].tolist(), strict=True):
        while sentence < last:
            tokens = next(target_lengths)
            stop = bisect_left(before, before[sentence] + tokens, sentence + MIN_SENTENCES, last - 1)
            if stop > last - 2:  # at most one sentence would remain
                stop = last
            rows.append((sentence + origin, stop + origin, tokens))
            sentence = stop
        next(target_lengths)  # Megatron draws another one at the end of a document
    return np.array(rows, np.int64).reshape(-1, 3)


def _draw_permutation(rows: int, seed: int) -> np.ndarray:
    """Draw a permutation with the Fisher-Yates shuffle: from the last row i down, swap it with row `word % (i + 1)`.

    A block of swaps is one operation on arrays. That is correct if no row is in two of them, which is nearly always so
    for an eighth of the square root of the remaining rows; otherwise they are done one by one.

    Returns:
      int64 [rows].
    """
    order = np.arange(rows)
    words = mersenne_twister_64(seed, rows)[: rows - 1]  # for the last row, the one before it, … and row 1
    swap_with = np.zeros(rows, np.int64)
    swap_with[1:] = words[::-1] % (order[1:] + 1).astype(np.uint64)
    stop = rows
    while stop > 1:
        first = stop - max(1, math.isqrt(stop) // 8)
        partners = swap_with[first:stop]
        if partners.max() < first and len(np.unique(partners)) == len(partners):
            order[first:stop], order[partners] = order[partners], order[first:stop].copy()
        else:
            for i in range(stop - 1, first - 1, -1):
                order[i], order[swap_with[i]] = order[swap_with[i]], order[i]
        stop = first
    return order


# --- The 64-bit Mersenne Twister of the C++ standard library ----------------------------------------------------------

STATE_WORDS, LAG_WORDS = 312, 156  # words the recurrence looks back, and words it computes together
LOWER_MASK = 2**31 - 1
UPPER_MASK = 2**64 - 1 - LOWER_MASK
TWIST_MATRIX = 0xB5026F5AA96619E9


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """The first `count` words of `std::mt19937_64(seed)`, uint64 [count]; NumPy has the generator only in 32 bits.

    Words follow the recurrence

        x[k + 312] = x[k + 156] ⊕ A(upper 33 bits of x[k], lower 31 bits of x[k + 1])

    and are returned tempered. A word depends on none of the 155 before it, so 156 at a time are one operation on
    arrays.

    Source: Matsumoto and Nishimura, mt19937-64.c (2004); C++11, 26.5.3.2; 26.5.5 gives the 10,000th word.
    """
    words = np.empty(STATE_WORDS + count, np.uint64)
    word = seed % 2**64
    for i in range(STATE_WORDS):
        words[i] = word
        word = (6364136223846793005 * (word ^ (word >> 62)) + i + 1) % 2**64
    for first in range(STATE_WORDS, len(words), LAG_WORDS):
        new = words[first : first + LAG_WORDS]
        before, after = words[first - STATE_WORDS :][: len(new)], words[first - STATE_WORDS + 1 :][: len(new)]
        np.bitwise_xor(((before & UPPER_MASK) | (after & LOWER_MASK)) >> 1, (after & 1) * TWIST_MATRIX, out=new)
        new ^= words[first - LAG_WORDS :][: len(new)]
    tempered = words[STATE_WORDS:]
    tempered ^= (tempered >> 29) & 0x5555555555555555
    tempered ^= (tempered << 17) & 0x71D67FFFEDA60000
    tempered ^= (tempered << 37) & 0xFFF7EEE000000000
    tempered ^= tempered >> 43
    return tempered


# --- The dataset ------------------------------------------------------------------------------------------------------

NUM_SPECIAL_TOKENS, MIN_SEQUENCE = 3, 5  # [CLS] and two [SEP]; with a token in each segment
_thread_local = threading.local()


@dataclass(eq=False)
class BertDataset(SplitDataset):
    """Samples of up to `sequence` tokens, 5 or more, in Megatron's order, from a dataset whose sequences are sentences.

    `mjax prepare --split-sentences --no-append-eod` writes them. Epochs are whole, so `len()` may exceed `samples`.

    Args:
      pieces: the vocabulary.

    Raises:
      UsageError: no document makes a sample, or `sequence` is too short.
    """

    pieces: WordPieceVocabulary = field(kw_only=True)

    def __post_init__(self):
        indexed, documents, samples, sequence = self.indexed, self.documents, self.samples, self.sequence
        if sequence < MIN_SEQUENCE:
            raise UsageError(f"--model.sequence {sequence} is too short for a pair; use {MIN_SEQUENCE} or more")
        boundaries = indexed.document_indices[documents.start : documents.stop + 1]

        def build() -> Arrays:
            lengths = indexed.lengths.copy()  # aligned, unlike the array in the file
            index = build_pair_index(lengths, boundaries, samples, sequence - NUM_SPECIAL_TOKENS, self.seed)
            return {"pair_index": index}

        source = {"kind": "sentence pairs", "lengths": indexed.fingerprint, "samples": samples, "sequence": sequence}
        source |= {"documents": hashlib.sha256(boundaries).hexdigest(), "seed": self.seed, "short": 1 / SHORT_SEQ_RATIO}
        self.pair_index = self.cache.load_or_build(source, ["pair_index"], build)["pair_index"]
        self._samples = len(self.pair_index)
        if not self._samples:
            problem = f"no document of {MIN_SENTENCES} or more sentences of up to {MAX_SENTENCE_TOKENS} tokens each"
            fix = "prepare the text with --split-sentences, or change --data.split"
            raise UsageError(f"the {self.name} of {indexed.prefix} has {problem}; {fix}")

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`.

        Returns:
          Arrays int32 [s]: "tokens", the inputs; "token_types", 1 in the second segment; "labels", the masked tokens, 0
          elsewhere; "documents", 1 for padding. "loss_mask" bool [s] is True for masked tokens, "sentence_order" int32
          [] is 1 if the segments are swapped.

        Raises:
          IndexError: there is no such sample.
          UsageError: it has an id outside the vocabulary.
        """
        self.check_index(index)
        begin, end, target_length = self.pair_index[index].tolist()
        random = _seed_generator((self.seed + index) % 2**32)

        pivot = begin + (1 if end - begin == 2 else random.randint(1, end - begin))
        is_swapped = random.random_sample() < 0.5
        segments = [self._read_sentences(begin, pivot, index), self._read_sentences(pivot, end, index)]
        if is_swapped:
            segments.reverse()
        first, second = _truncate_segments(*segments, target_length, random)

        cls, sep = np.array([[self.pieces.cls], [self.pieces.sep]], np.int32)
        tokens = np.concatenate([cls, first, sep, *([second, sep] if len(second) else [])])
        inputs, is_masked = create_masked_lm_predictions(tokens, target_length, self.pieces, random)

        n, padding = len(tokens), self.sequence - len(tokens)
        sample = {
            "tokens": np.pad(inputs, (0, padding), constant_values=self.pieces.pad),
            "token_types": np.zeros(self.sequence, np.int32),
            "labels": np.pad(np.where(is_masked, tokens, 0), (0, padding)),
            "loss_mask": np.pad(is_masked, (0, padding)),
            "documents": np.zeros(self.sequence, np.int32),
            "sentence_order": np.array(is_swapped, np.int32),
        }
        sample["token_types"][len(first) + 2 : n] = 1
        sample["documents"][n:] = 1
        return sample

    def _read_sentences(self, first: int, last: int, index: int) -> np.ndarray:
        """Tokens of sentences `first` to `last`, int32 [n]."""
        tokens = self.indexed.read_span(np.arange(first, last), 0, int(self.indexed.lengths[last - 1]))
        sample, vocabulary = f"sample {index} of {self.indexed.prefix}", len(self.pieces.is_continuation)
        check_sample_ids(tokens, vocabulary, sample, "its tokenizer's")
        return tokens.astype(np.int32)


def _seed_generator(seed: int) -> np.random.RandomState:
    """This thread's generator, reseeded: a new one would take as long as the rest of a sample."""
    if not hasattr(_thread_local, "random"):
        _thread_local.random = np.random.RandomState()
    _thread_local.random.seed(seed)
    return _thread_local.random


def _truncate_segments(
    first: np.ndarray, second: np.ndarray, target_length: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Truncate both segments to `target_length` tokens in total, one at a time off the longer, the second if equal."""
    bounds = [[0, len(first)], [0, len(second)]]
    excess = max(0, len(first) + len(second) - target_length)
    for draw in random.random_sample(excess).tolist():
        (begin, end), (second_begin, second_end) = bounds
        segment = bounds[0] if end - begin > second_end - second_begin else bounds[1]
        if draw < 0.5:
            segment[0] += 1
        else:
            segment[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]
