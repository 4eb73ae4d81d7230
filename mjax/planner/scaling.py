"""Scaling laws: the loss of N parameters after D tokens, from a few small runs.

    L(N, D) = E + A / N^α + B / D^β            arXiv 2203.15556, equation 2

The constants minimize the Huber loss (δ = 10⁻³), summed over the runs, between log L and the log-sum-exp of the three
terms, from a grid of starts and to a tight tolerance: the procedure as corrected by arXiv 2404.10102. N counts all
parameters that a token uses, with embeddings: without them the law bends for small models (arXiv 2406.12907).

Five runs hardly determine five constants. So α and β have a prior (`EXPONENTS`), and so has the balance of the two
terms at 20 tokens per parameter, where published fits have their optimum. Their weight is that of about one run each;
ten runs or more need none. Intervals come from fits to losses with new noise, and priors with other centers.

No JAX is imported here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations, product
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from mjax.config import Config
from mjax.config.model import ModelConfig
from mjax.config.plain_values import read
from mjax.errors import UsageError
from mjax.utils.files import write_whole

DELTA = 1e-3
NOISE = 0.003  # standard deviation of log L between seeds of small runs, at least; residuals of a fit can be larger
EXPONENTS, WIDTHS, BALANCED = (0.35, 0.35), (0.1, 0.1, 1.0), 20.0
"""Priors: centers of α and β; standard deviations of α, β, and the log ratio of the terms' derivatives at D = 20 N."""
MAX_PRIOR_RUNS = 9  # more runs determine the constants without priors
SHARES = tuple((a, b, 1 - a - b) for a, b in product((0.02, 0.1, 0.3), repeat=2))
"""Starts of the fit: shares of the three terms in the mean loss."""
DRAWS, COVERAGE = 200, 95
OF_LAW, TUNED = (
    ("model.kind", "model.vocabulary"),
    ("optimizer.learning_rate", "optimizer.parametrization", "train.global_batch"),
)
"""Settings that a law is of, and settings that the runs were tuned for."""


class Point(TypedDict):
    """A run: its loss after the last step; curve: share of the steps taken, and the validation loss then."""

    name: str
    parameters: int
    tokens: int
    flops: float
    layers: int
    hidden: int
    loss: float | None
    curve: list[list[float]]


def make_point(
    name: str, model: ModelConfig, parameters: int, tokens: int, loss: float | None = None, curve: Sequence = ()
) -> Point:
    """A run, with its compute 6 N D."""
    sizes = {"parameters": parameters, "tokens": tokens, "flops": 6.0 * parameters * tokens}
    return Point(name=name, layers=model.layers, hidden=model.hidden, **sizes, loss=loss, curve=list(curve))


class Forecast(NamedTuple):
    """A loss, nats per token, and the interval that covers it in `COVERAGE` of 100 cases."""

    loss: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" ({COVERAGE}%: {self.low:.4f} to {self.high:.4f})"
        return f"{self.loss:.4f}{interval}"


@dataclass(frozen=True)
class ScalingLaw:
    """The constants, and what they hold for: the contents of scaling.json.

    Attributes:
      source: of the constants, in words.
      noise: standard deviation of log L.
      runs: that were fitted.
      settings: of the first run, by name.
      draws: [log A, log B, log E, α, β] of fits to other noise; none: no interval is known.
    """

    source: str
    E: float
    A: float
    alpha: float
    B: float
    beta: float
    noise: float = NOISE
    runs: list[Point] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    draws: list[list[float]] = field(default_factory=list)

    @property
    def constants(self) -> np.ndarray:
        """[log A, log B, log E, α, β]."""
        return np.array([*np.log([self.A, self.B, self.E]), self.alpha, self.beta])

    @property
    def formula(self) -> str:
        """The law in numbers."""
        return f"L = {self.E:.4g} + {self.A:.4g} / N^{self.alpha:.3f} + {self.B:.4g} / D^{self.beta:.3f}"

    @property
    def largest(self) -> Point:
        """The run of the largest model, and of those the longest."""
        return max(self.runs, key=lambda run: (run["parameters"], run["tokens"]))

    def predict(self, parameters: float, tokens: float) -> Forecast:
        """The loss of a model after the last of its tokens."""
        loss = float(np.exp(log_loss(self.constants, parameters, tokens)))
        if not self.draws:
            return Forecast(loss, math.nan, math.nan)
        spread = log_loss(np.array(self.draws).T, parameters, tokens) - math.log(loss)
        tails = np.percentile(spread, [50 - COVERAGE / 2, 50 + COVERAGE / 2])
        low, high = np.hypot(tails, 1.96 * self.noise) * (-1, 1)
        return Forecast(loss, loss * math.exp(low), loss * math.exp(high))

    def curve(self, parameters: float, tokens: float) -> dict[float, Forecast]:
        """The forecast of a validation loss by the share of the steps taken.

        The excess L − E over that of the last step is nearly the same for all sizes that follow one schedule (arXiv
        2507.02119): the largest run gives its mean, and all runs its range, interpolated between their validations.
        """
        end = self.predict(parameters, tokens)
        curves = [run["curve"] for run in sorted(self.runs, key=lambda run: run["flops"])]
        if not curves or not all(curves):
            return {}
        first = max(curve[0][0] for curve in curves)
        shares = [first, *(share for share, _ in curves[-1] if share > first)]
        excess = np.array([np.interp(shares, *np.transpose(curve)) for curve in curves]) - self.E
        low, high = end.low - self.E, end.high - self.E
        return {
            share: Forecast(*(self.E + part for part in (x[-1] * (end.loss - self.E), min(x) * low, max(x) * high)))
            for share, x in zip(shares, (excess / excess[:, -1:]).T.tolist(), strict=True)
        }

    def optimal_tokens(self, parameters: float) -> float:
        """Tokens at which this size is the best use of its compute 6 N D: α A / N^α = β B / D^β."""
        return (self.beta * self.B / (self.alpha * self.A) * parameters**self.alpha) ** (1 / self.beta)

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Tokens with which a model reaches a loss; infinite if it never does."""
        rest = loss - self.E - self.A / parameters**self.alpha
        return (self.B / rest) ** (1 / self.beta) if rest > 0 else math.inf

    def write(self, file: Path) -> None:
        """Write scaling.json, atomically."""
        write_whole(file, json.dumps(asdict(self), indent=1) + "\n")


PUBLISHED = ScalingLaw(
    "published constants (arXiv 2404.10102: data and tokenizer of Chinchilla)",
    E=1.8172, A=482.01, alpha=0.3478, B=2085.43, beta=0.3658,
)  # fmt: skip


def read_scaling(file: Path, config: Config) -> ScalingLaw:
    """Read a scaling.json.

    Raises:
      UsageError: it is missing or damaged, or its runs had another architecture or vocabulary than `config`.
    """
    law = read(ScalingLaw, file, "repeat the command mjax scale", "give the scaling.json of mjax scale, or None")
    for name in OF_LAW:
        then, now = law.settings.get(name), describe_settings(config)[name]
        if then not in (None, now):
            raise UsageError(f"{file} is of runs with {name} {then}, and this config has {now}; type mjax scale for it")
    return law


def describe_settings(config: Config) -> dict[str, str]:
    """The settings of a run that a plan compares, in words."""
    return {name: str(attrgetter(name)(config)) for name in (*OF_LAW, *TUNED)}


# --- The fit ----------------------------------------------------------------------------------------------------------


def log_loss(constants: np.ndarray, parameters: float | np.ndarray, tokens: float | np.ndarray) -> np.ndarray:
    """log L, of constants [5] or of several [5, …]."""
    a, b, e, alpha, beta = constants
    return np.logaddexp(np.logaddexp(a - alpha * np.log(parameters), b - beta * np.log(tokens)), e)


def fit_law(runs: Sequence[Point]) -> ScalingLaw:
    """Fit the runs, and bootstrap the constants.

    Raises:
      UsageError: as `check_runs`.
    """
    check_runs(runs)
    N, D, L = (np.array([run[name] for run in runs], float) for name in ("parameters", "tokens", "loss"))
    centers, random = np.array([*EXPONENTS, 0.0]), np.random.default_rng(0)
    starts = [np.array([*np.log(L.mean() * np.array(shares)), *EXPONENTS]) for shares in SHARES]
    best = min((_minimize(start, N, D, np.log(L), centers) for start in starts), key=lambda fit: fit.fun).x
    constants = _constants(best, N, D)
    fitted = log_loss(constants, N, D)
    noise = max(NOISE, math.sqrt(np.square(np.log(L) - fitted).sum() / max(len(runs) - len(best), 1)))
    draws = []
    for _ in range(DRAWS):
        losses, shifted = random.normal(fitted, noise), random.normal(centers, WIDTHS)
        draws.append(_constants(_minimize(best, N, D, losses, shifted).x, N, D).tolist())
    needs_priors = len(runs) <= MAX_PRIOR_RUNS
    held = "with priors of α, β and their balance" if needs_priors else "by the procedure of arXiv 2404.10102"
    (A, B, E), (alpha, beta) = np.exp(constants[:3]).tolist(), constants[3:].tolist()
    source = f"a fit of {len(runs)} runs {held}"
    return ScalingLaw(source, E, A, alpha, B, beta, noise, list(runs), draws=draws)


def _constants(x: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """[log A, log B, log E, α, β], where the first two of `x` are log terms at the mean log N and log D."""
    return x + np.array([x[3] * np.log(N).mean(), x[4] * np.log(D).mean(), 0, 0, 0])


def _minimize(start: np.ndarray, N: np.ndarray, D: np.ndarray, log_L: np.ndarray, centers: np.ndarray):
    """Minimize the Huber loss and the priors with these centers, by L-BFGS with exact derivatives."""
    from scipy.optimize import minimize  # takes a third of a second to import

    n, d = (np.log(x) - np.log(x).mean() for x in (N, D))
    offset = math.log(BALANCED) + float(np.log(N).mean() - np.log(D).mean())
    weights = np.square(NOISE / np.array(WIDTHS)) * (len(N) <= MAX_PRIOR_RUNS)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        a, b, e, alpha, beta = x
        terms = np.exp([a - alpha * n, b - beta * d, e + 0 * n])
        loss = terms.sum(0)
        error = np.log(loss) - log_L
        slope = np.clip(error, -DELTA, DELTA)
        huber = slope * (error - slope / 2)
        terms *= slope / loss
        balance = a + math.log(alpha) - b - math.log(beta) + beta * offset
        off = np.array([alpha, beta, balance]) - centers
        pull = weights * off
        gradient = np.array([*terms.sum(1), pull[0] - terms[0] @ n, pull[1] - terms[1] @ d])
        gradient += pull[2] * np.array([1, -1, 0, 1 / alpha, offset - 1 / beta])
        return huber.sum() + off @ pull / 2, gradient

    bounds = [(-20, 20)] * 3 + [(0.01, 3)] * 2  # beyond them a term overflows
    options = {"maxiter": 10_000, "maxfun": 20_000, "ftol": 1e-15, "gtol": 1e-12}
    return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def check_runs(runs: Sequence[Point]) -> None:
    """Check that runs can be fitted.

    Raises:
      UsageError: there are fewer than three different ones, or one has diverged.
    """
    if len({(run["parameters"], run["tokens"]) for run in runs}) < 3:
        few = f"{len(runs)} runs of two sizes or lengths determine no curve"
        raise UsageError(f"{few}; give three different runs or more")
    fix = "lower --optimizer.learning-rate, with another --output, or leave the run out"
    for run in runs:
        if run["loss"] is None:
            raise UsageError(f"{run['name']} has diverged: its validation loss is not finite; {fix}")
    for less, more in permutations(runs, 2):
        is_smaller = less["parameters"] <= more["parameters"] and less["tokens"] <= more["tokens"]
        if is_smaller and less["flops"] < more["flops"] and more["loss"] > less["loss"] * (1 + 3 * NOISE):
            above = f"its validation loss {more['loss']:.4f} is above {less['loss']:.4f} of {less['name']}"
            raise UsageError(f"{more['name']} has diverged: {above}, which has fewer parameters or tokens; {fix}")
