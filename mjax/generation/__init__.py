"""Text from a trained model, and the options for sampling its tokens (`generate.sample_tokens`)."""

from dataclasses import dataclass
from typing import Annotated

from mjax.config.bounds import Bounds, Count, CountOrZero, NotNegative, Seed
from mjax.config.marks import Synonyms


@dataclass(frozen=True)
class Sampling:
    """Sampling options, and the number of tokens."""

    tokens: Annotated[Count, Synonyms("max-length max-new-tokens tokens max-tokens")] = 128
    """Maximum number of tokens to generate."""
    temperature: Annotated[NotNegative, Synonyms("temp")] = 0.8
    """Divides the logits: below 1 likely tokens become likelier. 0 always takes the most likely one."""
    top_k: CountOrZero = 0
    """Sample from this many most likely tokens (0: all)."""
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 0.9
    """Sample from the smallest set of tokens with at least this probability (1: all), after temperature and top-k."""
    seed: Annotated[Seed, Synonyms("random-seed")] = 0
    """Determines the samples."""
