"""A DeepSeek-V3 with two dense layers of five equals the serial float64 reference in all pairs of ways to split it."""

from itertools import combinations, product

import pytest

from tests.against_reference import largest_error, update_errors
from tests.models.test_token_dispatcher import ROUTERS, router  # noqa: F401 - a fixture
from tests.small import small_config
from tests.training.test_step_equals_reference import LATENT, YARN_3

MODEL = {
    **LATENT, **YARN_3, "layers": 5, "first_dense_layers": 2, "feed_forward": 40, "q_lora_rank": 14, "mtp_layers": 1,
    "mtp_loss_coef": 0.5, "router": "sigmoid", "router_scale": 2.5, "router_bias_update_rate": 0.01,
    "experts_per_token": 2, "moe_token_dispatcher": "alltoall", "router_topk_groups": 1,
}  # fmt: skip
WAYS = {
    "router": tuple(ROUTERS),  # with 4 ranks of experts one, two and four rounds, the most
    "router_n_groups": (1, 2),  # with 4 ranks two all-to-alls
    "expert": (1, 2, 4),
    "pipe": (1, 2, 3),
    "context": (1, 2),
    "zero": (1, 3),
    "replicate": (1, 2),
    "sequence_parallel": (False, True),
    "lora_rank": (0, 3),
}
DEVICES = 16


def devices_of(case):
    return case["expert"] * case["pipe"] * case["context"] * case["replicate"] * (1 + case["sequence_parallel"])


def pairs_of(case):
    return set(combinations(case.items(), 2))


def cases_of_all_pairs():
    """Greedily the case with the most pairs that no case before has, and of these the one with the fewest devices."""
    cases = [dict(zip(WAYS, values, strict=True)) for values in product(*WAYS.values())]
    cases = sorted((case for case in cases if devices_of(case) <= DEVICES), key=devices_of)
    missing, chosen = set().union(*map(pairs_of, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


CASES = cases_of_all_pairs()


def name_of(case):
    return "" if isinstance(case, str) else "-".join(map(str, case.values()))


def test_cases_have_all_pairs():
    expected = sum(len(a) * len(b) for a, b in combinations(WAYS.values(), 2))
    assert len(set().union(*map(pairs_of, CASES))) == expected


@pytest.mark.ci
@pytest.mark.parametrize(
    ("router", "case"), [(case["router"], case) for case in CASES], indirect=["router"], ids=name_of
)
def test_pair_equals_the_serial_reference(router, case):  # noqa: F811 - the fixture
    mesh = {name: case[name] for name in ("expert", "pipe", "context", "zero", "replicate", "sequence_parallel")}
    config = small_config(
        case["expert"] * case["replicate"], 1 + case["sequence_parallel"], 1, "full", "fp64", 0.0, 8, mesh,
        lora_rank=case["lora_rank"], router_n_groups=case["router_n_groups"], **MODEL,
    )  # fmt: skip
    errors = update_errors(config) if case["lora_rank"] else largest_error(config, scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors
