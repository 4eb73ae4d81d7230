"""The fit of scaling laws, against published constants and against constants that the test chose."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mjax.planner import scaling
from mjax.planner.scaling import PUBLISHED, Point, fit_law, log_loss
from tests.conftest import ROOT

TRUE = {"E": 1.7, "A": 40.0, "alpha": 0.3, "B": 60.0, "beta": 0.38}


def points(N, D, L):
    sizes = zip(N.tolist(), D.tolist(), L.tolist(), strict=True)
    zeros = {"layers": 1, "hidden": 1, "curve": []}
    return [Point(name=f"{n:g}", parameters=n, tokens=d, flops=6 * n * d, loss=loss, **zeros) for n, d, loss in sizes]


def true_loss(N, D, E, A, alpha, B, beta):
    return E + A / N**alpha + B / D**beta


def test_fit_equals_published_one_of_chinchilla(monkeypatch):
    """Standard errors: arXiv 2404.10102, table 1; 240 runs of figure 4 of arXiv 2203.15556, as read from the vector
    graphics there (github.com/Besiroglu/data, without the five of highest loss, D = C / 6 N)."""
    monkeypatch.setattr(scaling, "DRAWS", 20)
    monkeypatch.setattr(scaling, "check_runs", lambda runs: None)  # losses come from colors
    N, C, L = np.loadtxt(ROOT / "tests/planner/chinchilla.csv", delimiter=",", skiprows=1).T
    kept = np.argsort(L)[:240]
    law = fit_law(points(N[kept], C[kept] / 6 / N[kept], L[kept]))
    errors = {"E": 0.03, "A": 124.58, "alpha": 0.02, "B": 1293.23, "beta": 0.02}
    for name, error in errors.items():
        assert getattr(law, name) == pytest.approx(getattr(PUBLISHED, name), abs=error / 10)
    spread = np.std([np.exp(draw[:3]) for draw in law.draws], axis=0)
    assert spread[0] == pytest.approx(errors["A"], rel=0.4)
    assert spread[2] == pytest.approx(errors["E"], rel=0.4)


def test_fit_recovers_constants_despite_noise(monkeypatch):
    monkeypatch.setattr(scaling, "DRAWS", 30)
    N, D = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e6, 1e9, 12), np.geomspace(1e8, 1e11, 12)))
    random = np.random.default_rng(0)
    law = fit_law(points(N, D, true_loss(N, D, **TRUE) * random.normal(1, 0.0005, N.size)))
    for name in ("E", "alpha", "beta"):
        assert getattr(law, name) == pytest.approx(TRUE[name], abs=0.01)
    low, high = np.percentile(law.draws, [2.5, 97.5], axis=0)
    wanted = [*np.log([TRUE["A"], TRUE["B"], TRUE["E"]]), TRUE["alpha"], TRUE["beta"]]
    assert ((low < wanted) & (wanted < high)).all()


def test_curve_interpolates_runs_of_other_shares():
    """Runs of 19 and 100 steps, validated every step and every tenth, whose loss falls linearly from 5 to 3."""
    law = replace(PUBLISHED, runs=points(np.array([1e6, 2e6]), np.array([2e7, 4e7]), np.array([3.0, 3.0])))
    for run, steps, interval in zip(law.runs, (19, 100), (1, 10), strict=True):
        run["curve"] = [[step / steps, 5 - 2 * step / steps] for step in range(interval, steps + 1, interval)]
    end, curve = law.predict(1e7, 2e8), law.curve(1e7, 2e8)
    assert list(curve) == [number / 10 for number in range(1, 11)]
    assert curve[1.0].loss == pytest.approx(end.loss)
    excess = (5 - 2 * 0.3 - law.E) / (3 - law.E)
    assert curve[0.3].loss == pytest.approx(law.E + excess * (end.loss - law.E))


def test_gradient_of_objective_is_exact(monkeypatch):
    """The optimum does not move if SciPy differentiates by itself."""
    N, D = np.array([1e5, 2e5, 4e5, 8e5]), np.array([2e6, 8e6, 8e6, 2e7])
    losses, start = np.log(true_loss(N, D, **TRUE)), np.array([0.1, 0.2, 0.5, 0.3, 0.4])
    import scipy.optimize

    seen = {}
    monkeypatch.setattr(scipy.optimize, "minimize", lambda function, x, **_: seen.update(function=function))
    scaling._minimize(start, N, D, losses, np.array([0.35, 0.35, 0.0]))
    gradient = seen["function"](start)[1]
    for index, slope in enumerate(gradient):
        step = np.eye(5)[index] * 1e-6
        rise = seen["function"](start + step)[0] - seen["function"](start - step)[0]
        assert rise / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-9)


def test_five_runs_forecast_ten_times_compute(monkeypatch):
    """At 10 times the compute of the largest of five runs: errors of losses with a noise of 0.1%, and the intervals."""
    monkeypatch.setattr(scaling, "DRAWS", 10)
    random, errors, covered = np.random.default_rng(0), [], 0
    N = np.array([1e5, 2e5, 4e5, 8e5, 4e5])
    D = N * [20, 20, 20, 20, 80]
    for _ in range(4):
        alpha, beta = random.uniform(0.25, 0.45, 2)
        rest, share = 4.5 - (E := random.uniform(1.5, 3.5)), random.uniform(0.3, 0.7)
        true = (E, share * rest * N[3] ** alpha, alpha, (1 - share) * rest * D[3] ** beta, beta)
        law = fit_law(points(N, D, true_loss(N, D, *true) * random.normal(1, 0.001, 5)))
        size = N[3] * 10**0.5, D[3] * 10**0.5
        wanted, forecast = true_loss(*size, *true), law.predict(*size)
        errors.append(forecast.loss / wanted - 1)
        covered += forecast.low < wanted < forecast.high
    assert np.sqrt(np.mean(np.square(errors))) < 0.01
    assert covered >= 3


@pytest.mark.parametrize(
    ("losses", "large"),
    [
        ((5.220676, 3.800284, 3.432646, 3.195050, 3.041737), 2.656859),
        ((5.387021, 3.899943, 3.531147, 3.313851, 3.149769), 2.768757),
        ((5.271892, 3.860916, 3.517894, 3.211374, 3.130516), 2.763351),
    ],
    ids=["C4", "RedPajama", "RefinedWeb"],
)
def test_five_published_runs_forecast_larger_one(monkeypatch, losses, large):
    """12 times the compute: runs of arXiv 2403.08540 (github.com/mlfoundations/scaling, exp_data/models, commit
    041eb2f1), 20 tokens per parameter and in the fourth 80, with the loss on 174 million tokens of C4 (c4_val)."""
    monkeypatch.setattr(scaling, "DRAWS", 20)
    N = np.array([10_569_312, 78_914_048, 153_677_376, 153_677_376, 411_616_256])
    D = np.array([211_386_240, 1_578_280_960, 3_073_547_520, 12_294_190_080, 8_232_325_120])
    forecast = fit_law(points(N, D, np.array(losses))).predict(1_439_795_200, 28_795_904_000)
    assert forecast.loss == pytest.approx(large, rel=0.012)
    assert forecast.low < large < forecast.high


@pytest.mark.filterwarnings("error")
def test_runs_on_a_plateau_follow_no_law():
    """A GPT with 128 positions (benchmarks/log/2026-11-30-loss-forecasts.md): its short runs end near 2.45."""
    N = np.array([19_312, 38_184, 63_200, 63_200, 131_664])
    D = np.array([387_072, 763_904, 1_264_640, 5_056_512, 2_633_728])
    assert fit_law(points(N, D, np.array([2.5391, 2.4638, 2.3112, 1.7216, 1.7626]))).noise > 0.1


def test_optimum_is_that_of_search():
    compute = 5.76e23
    sizes = np.geomspace(1e9, 1e12, 20_001)
    best = sizes[np.argmin(log_loss(PUBLISHED.constants, sizes, compute / 6 / sizes))]
    assert 6 * best * PUBLISHED.optimal_tokens(best) == pytest.approx(compute, rel=0.01)
    assert PUBLISHED.tokens_for(PUBLISHED.predict(best, 1e12).loss, best) == pytest.approx(1e12, rel=1e-6)
    assert math.isinf(PUBLISHED.tokens_for(1.9, 1e9))
