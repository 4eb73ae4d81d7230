"""BERT's samples: two segments of text with some tokens hidden, and whether the segments are in order.

    sentences of a document      a b c | d e                       cut at a random place into two segments
    in order, or exchanged       a b c | d e   or   d e | a b c    half of the samples each
    cut to the target length     the longer one loses tokens at its front or its end, at random
    tokens                       [CLS] a b c [SEP] d e [SEP] [PAD] [PAD]
    token types                    0   0 0 0   0   1 1   1     0     0
    documents                      0   0 0 0   0   0 0   0     1     1      attention stays within a number
    hidden                       [CLS] a b c [SEP] [MASK] e [SEP] [PAD] [PAD]

The model predicts the hidden tokens (`masking`) and the order of the segments, which 1909.08053, §4.2 takes from ALBERT
(Lan et al. 2020) in place of BERT's next-sentence prediction. Without that second task a sample is one segment.

Sample i depends on the data, the seed and i alone: it has its own generator, seeded with (seed + i) mod 2^32. It is
Megatron's sample i, token for token, with two exceptions:

- Any padding id works. Megatron fills its padding mask and its token types with that id, so both are wrong unless it is
  0, and treats every token of that id as padding, even one that masking inserted.
- An id in the middle of a sample is kept. Megatron replaces the padding id by 0 everywhere.

Source: Megatron-LM, core/datasets/bert_dataset.py.
"""

import hashlib
import threading

import numpy as np

from mjax.data.cache import NO_CACHE, IndexCache
from mjax.data.indexed import IndexedDataset
from mjax.data.masking import WordPieces, create_masked_lm_predictions
from mjax.data.samples import advice, check_ids
from mjax.data.sentence_pairs import LONG_SENTENCE, build_pair_index
from mjax.errors import UsageError

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
      sentence_order: whether samples are two segments, in order or exchanged.
      short_probability: share of samples with a shorter target length, from 0 to 1.
      mask_probability: share of tokens that are hidden, above 0 and below 1.
      cache: keeps the index on disk.

    Raises:
      UsageError: no document makes a sample, or `sequence` is too short.
      ValueError: a probability is outside its range.
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
        sentence_order: bool = True,
        short_probability: float = 0.1,
        mask_probability: float = 0.15,
        cache: IndexCache = NO_CACHE,
    ):
        if not (0 <= short_probability <= 1 and 0 < mask_probability < 1):
            raise ValueError(f"probabilities {short_probability} of short samples and {mask_probability} of masks")
        if sequence < SPECIAL + 2:
            raise UsageError(
                f"--model.sequence {sequence} leaves no room for two tokens beside [CLS] and two [SEP]; "
                f"use {SPECIAL + 2} or more, such as 512"
            )
        self.indexed, self.sequence, self.seed, self.pieces = indexed, sequence, seed, pieces
        self.sentence_order, self.mask_probability = sentence_order, mask_probability
        boundaries = indexed.document_indices[documents.start : documents.stop + 1]
        fewest = 2 if sentence_order else 1

        def build() -> dict[str, np.ndarray]:
            lengths = indexed.lengths.copy()  # aligned, which those in the file are not
            index = build_pair_index(lengths, boundaries, samples, sequence - SPECIAL, short_probability, seed, fewest)
            return {"pair_index": index}

        if not documents:
            fix = f"use --data.split {indexed.documents - 1},1,0" if indexed.documents > 1 else None
            fix = fix or advice(indexed.tokens, sequence)
            raise UsageError(f"the {name} of {indexed.prefix} has none of its {indexed.documents:,} documents; {fix}")
        drawn = hashlib.sha256(boundaries).hexdigest()
        source = {"kind": "sentence pairs", "lengths": indexed.fingerprint, "documents": drawn, "samples": samples}
        source |= {"sequence": sequence, "seed": seed, "short": short_probability, "fewest": fewest}
        self.pair_index = cache.arrays(source, ["pair_index"], build)["pair_index"]
        if not len(self.pair_index):
            raise UsageError(
                f"the {name} of {indexed.prefix} has no document of {fewest} or more sentences, none of them of more "
                f"than {LONG_SENTENCE} tokens; prepare the text with --split-sentences, or give it a larger share with "
                "--data.split"
            )

    def __len__(self) -> int:
        return len(self.pair_index)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`.

        Returns:
          "tokens" int32 [s], as the model sees them; "token_types" int32 [s], 1 in the second segment; "labels" int32
          [s], what is hidden, 0 elsewhere; "loss_mask" bool [s], where something is hidden; "documents" int32 [s], 1
          for padding; and with `sentence_order` that, int32 [], 1 where the segments are exchanged.

        Raises:
          IndexError: there is no such sample.
          UsageError: it holds an id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.indexed.prefix}, whose order was drawn for {len(self)}")
        first, last, wanted = self.pair_index[index].tolist()
        random = _generator((self.seed + index) % 2**32)

        pivot, exchanged = last, False
        if self.sentence_order:
            pivot = first + (1 if last - first == 2 else random.randint(1, last - first))
            exchanged = random.random_sample() < 0.5
        segments = [self._sentences(first, pivot, index), self._sentences(pivot, last, index)]
        if exchanged:
            segments.reverse()
        one, two = _truncate(*segments, wanted, random)

        special = np.array([self.pieces.cls, self.pieces.sep], np.int32)
        second = [two, special[1:]] if len(two) else []
        tokens = np.concatenate([special[:1], one, special[1:], *second])
        seen, hidden = create_masked_lm_predictions(tokens, wanted, self.pieces, random, self.mask_probability)

        n, padding = len(tokens), self.sequence - len(tokens)
        sample = {
            "tokens": np.pad(seen, (0, padding), constant_values=self.pieces.pad),
            "token_types": np.zeros(self.sequence, np.int32),
            "labels": np.pad(np.where(hidden, tokens, 0), (0, padding)),
            "loss_mask": np.pad(hidden, (0, padding)),
            "documents": np.zeros(self.sequence, np.int32),
        }
        sample["token_types"][len(one) + 2 : n] = 1
        sample["documents"][n:] = 1
        if self.sentence_order:
            sample["sentence_order"] = np.array(exchanged, np.int32)
        return sample

    def _sentences(self, first: int, last: int, index: int) -> np.ndarray:
        """Tokens of sentences `first` to `last`, int32 [n]."""
        if first == last:
            return np.empty(0, np.int32)
        tokens = self.indexed.join(np.arange(first, last), 0, int(self.indexed.lengths[last - 1]))
        fix, sample = "use the tokenizer that the data was prepared with", f"sample {index} of {self.indexed.prefix}"
        check_ids(tokens, len(self.pieces.continues), sample, "the vocabulary of its tokenizer", fix)
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
