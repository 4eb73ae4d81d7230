"""Masked language modelling: the tokens of a sample that BERT must predict, and their replacements.

About 15% of the tokens are hidden, in spans of one to three whole words. A word is a WordPiece and the "##" pieces that
follow it:

    tokens   [CLS]  the  un ##believ ##able  cat  sat  [SEP]
    words            0   1  1        1        2    3

Words are visited in random order. At each the length n of a span is drawn, shorter ones more often: P(n) ∝ 1/n, that is
55%, 27% and 18%. The span covers that word and the next n − 1; if it would hide too many tokens, it loses words from
its end until it fits, and if the first word alone is too long, or part of the span is hidden already, it is skipped. Of
the tokens in a span 80% become [MASK], 10% a random token and 10% are kept, each drawn separately, so that the model
cannot see which tokens it has to predict. [CLS] and [SEP] are never hidden.

The draws are Megatron's, in their order, on the given generator, so masks are Megatron's token for token. Options that
pretrain_bert.py leaves off are absent: pieces instead of words, spans that are long rather than short or of a geometric
distribution (SpanBERT's), and exchanged tokens (StructBERT's), which draws on NumPy's global generator and so cannot be
repeated.

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
    """Parts of a vocabulary that masking needs: its special ids, and the ids that continue a word."""

    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray
    """True for "##" pieces, bool [vocabulary]."""

    @classmethod
    def of(cls, tokenizer: BertTokenizer) -> "WordPieces":
        """The parts of a tokenizer's vocabulary."""
        continues = np.zeros(tokenizer.vocabulary, bool)
        continues[[number for piece, number in tokenizer.library.get_vocab().items() if piece.startswith("##")]] = True
        return cls(tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad, continues)


def find_words(tokens: np.ndarray, pieces: WordPieces) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens that may be hidden, and where among them each word begins and the last one ends.

    The pieces of word w are at `places[bounds[w] : bounds[w + 1]]`. As in Megatron, a segment that lost the beginning
    of a word continues the last word of the segment before.

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
      wanted: target length; at most `probability` of it are hidden, even in a longer sample.
      pieces: of the vocabulary.
      random: drawn from.
      probability: share of the tokens to hide, at least one.

    Returns:
      The tokens as the model sees them, int32 [n], and whether each is to be predicted, bool [n].
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
