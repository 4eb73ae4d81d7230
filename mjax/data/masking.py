"""Masked language modelling: which tokens of a sample BERT has to guess, and what it sees in their place.

About 15% of the tokens are hidden, in spans of one to three whole words. A word is a piece of WordPiece and the "##"
pieces that follow it:

    tokens   [CLS]  the  un ##believ ##able  cat  sat  [SEP]
    words            0   1  1        1        2    3

Words are visited in random order. At each the length n of a span is drawn, shorter ones more often: P(n) ∝ 1/n, that is
55%, 27% and 18%. The span covers that word and the next n − 1; if it would hide more than is still to be hidden, it
loses words from its end until it does not, and if the first alone is too much, or part of the span is hidden already,
nothing happens. Of the tokens in a span 80% become [MASK], 10% a random token and 10% stay as they are, each by a
draw of its own, so that the model cannot rely on seeing which tokens it has to guess. [CLS] and [SEP] are never hidden.

The draws are Megatron's, in their order, on the generator that is given, so masks are Megatron's token for token. Its
switches that pretrain_bert.py leaves off are absent: pieces in place of words, spans that are long rather than short or
of a geometric distribution (SpanBERT's), and exchanging tokens besides (StructBERT's), which draws on NumPy's global
generator and so cannot be repeated.

Source: Devlin et al. 2019, §3.1; 1909.08053, §4.2; Megatron-LM, core/datasets/masked_dataset.py and bert_dataset.py.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from mjax.data.tokenizers import BertTokenizer

LONGEST = 3  # words of a span
SHARES = 1 / np.arange(1, LONGEST + 1)
SHARES /= SHARES.sum()
UP_TO = SHARES.cumsum()
UP_TO = (UP_TO / UP_TO[-1]).tolist()  # probability of a span of at most 1, 2, 3 words, as `RandomState.choice` sums it
MASKED, REPLACED = 0.8, 0.5  # share that becomes [MASK], and of the rest the share that becomes a random token


@dataclass(frozen=True)
class WordPieces:
    """Parts of a vocabulary that masking needs: its special ids, and which ids continue a word."""

    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray
    """Whether an id is a "##" piece, bool [vocabulary]."""

    @classmethod
    def of(cls, tokenizer: BertTokenizer) -> "WordPieces":
        """Those of a tokenizer."""
        continues = np.zeros(tokenizer.vocabulary, bool)
        continues[[number for piece, number in tokenizer.library.get_vocab().items() if piece.startswith("##")]] = True
        return cls(tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad, continues)


def find_words(tokens: np.ndarray, pieces: WordPieces) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens that may be hidden, and where among them each word begins and the last one ends.

    The pieces of word w are the positions `places[bounds[w] : bounds[w + 1]]`. As in Megatron a segment that begins in
    the middle of a word, having lost its first tokens, continues the last word of the one before.

    Args:
      tokens: [n], [CLS] and [SEP] included.

    Returns:
      places [tokens but [CLS] and [SEP]], bounds [words + 1].
    """
    places = np.flatnonzero((tokens != pieces.cls) & (tokens != pieces.sep))
    begins = ~pieces.continues[tokens[places]]
    begins[:1] = True
    return places, np.append(np.flatnonzero(begins), len(places))


def create_masked_lm_predictions(
    tokens: np.ndarray,
    wanted: int,
    pieces: WordPieces,
    random: np.random.RandomState,
    probability: float = 0.15,
) -> tuple[np.ndarray, np.ndarray]:
    """Hide some tokens of a sample.

    Args:
      tokens: the sample, int32 [n], [CLS] and [SEP] included.
      wanted: tokens that were wanted of it; no more than `probability` of them are hidden, should it be longer.
      pieces: of the vocabulary.
      random: drawn from.
      probability: share of the tokens to hide, at least one.

    Returns:
      The tokens as the model sees them, int32 [n], and whether each is to be guessed, bool [n].
    """
    most = int(min(probability * wanted, max(1, round(len(tokens) * probability))))
    places, bounds = (found.tolist() for found in find_words(tokens, pieces))
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
        span = places[first:last]  # of no token where the first word alone is too much
        if not hidden.isdisjoint(span):
            continue
        hidden.update(span)
        for place in span:
            if random.random_sample() < MASKED:
                seen[place] = pieces.mask
            elif random.random_sample() >= REPLACED:
                seen[place] = random.randint(0, len(pieces.continues))
    guessed = np.zeros(len(tokens), bool)
    guessed[list(hidden)] = True
    return seen, guessed
