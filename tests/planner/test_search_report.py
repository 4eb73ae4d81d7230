"""What the search prints and hands over, from made-up memory and time."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from mjax.config import load_config
from mjax.hardware import GIB, gpu_named
from mjax.planner.search import Candidate, Found, search
from mjax.planner.search_report import Question, cost, faster_by, held_back_by, report
from mjax.planner.time_section import run_tokens


@dataclass(frozen=True)
class Bytes:
    parameters: float
    activations: float
    host: float = 0.0
    moment: ClassVar[str] = "backward"

    @property
    def total(self):
        return self.parameters + self.activations


@dataclass(frozen=True)
class Seconds:
    matmul: float
    model: float
    bubble: float
    error: float = 0.05
    model_tflops: float = 400.0
    mfu: float | None = 0.4
    caveats: tuple = ()

    @property
    def parts(self):
        return {"matmul": self.matmul, "model": self.model, "bubble": self.bubble}

    @property
    def total(self):
        return sum(self.parts.values())

    @property
    def mean(self):
        return self.total


def memory_of(config):
    held = {"none": 60, "selective": 30, "full": 3, "offload": 0}[config.train.recompute] * config.train.micro_batch
    host = 3 * GIB * config.train.micro_batch if config.train.recompute == "offload" else 0.0
    return Bytes(160 * GIB / (config.mesh.pipe * config.mesh.model), GIB * held / config.mesh.model, host)


def time_of(config):
    mesh, recompute = config.mesh, config.train.recompute
    products = (
        3.0
        * {"none": 1.0, "selective": 1.02, "full": 4 / 3, "offload": 1.4}[recompute]
        * config.train.global_batch
        / 512
    )
    products *= 0.9 if config.model.attention_dropout == 0 else 1.0
    bubble = products * (mesh.pipe - 1) / config.micro_batches / mesh.chunks
    return Seconds(products, 0.01 * mesh.model * mesh.data / mesh.devices * 512, bubble)


def kernel_of(config):
    return "cudnn" if config.model.attention_dropout == 0 and config.precision.compute != "fp32" else "xla"


@pytest.fixture(scope="module")
def found():
    config = load_config("gpt_8b")
    return search(config, 64, memory_of, time_of, 71 * GIB, ["mesh.zero", "mesh.schedule", "mesh.sequence_parallel"])


def question(**changes):
    return replace(Question("gpt_8b", load_config("gpt_8b"), gpu_named("h100"), None, 3, time_of, kernel_of), **changes)


def test_the_report_says_what_was_tried_and_shows_the_fastest(found):
    text = report(found, question(), 1.5).text
    first, tried, *_ = text.splitlines()
    assert first == "--- Search: gpt_8b on 64 × h100 ---"
    assert tried == (
        f"{found.tried:,} ways to run it: {len(found.too_big):,} are too big for 71.0 GiB, "
        f"{len(found.tight):,} leave less than 5% of it free, {len(found.roomy):,} fit (1.5 s)"
    )
    best = found.ranked[0]
    rows = [line.split() for line in text.splitlines() if line[:2] in ("1 ", "2 ", "3 ") and "before" not in line]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    mesh = best.config.mesh
    assert rows[0][1:4] == [str(mesh.pipe), str(mesh.data), str(mesh.model)]
    assert f"{best.time.total:.3g}" in rows[0]
    assert "cost" not in text


def test_host_memory_has_a_column_where_a_candidate_needs_some_and_what_lacks_it_is_counted():
    config = load_config("gpt_8b")
    kept = ["mesh.zero", "mesh.schedule", "mesh.sequence_parallel", "train.recompute", "train.micro_batch"]
    own = replace(config, train=replace(config.train, recompute="offload", micro_batch=4))
    section = report(search(own, 64, memory_of, time_of, 71 * GIB, kept, host=12 * GIB), question(config=own), 1.5)
    header = next(line for line in section.lines if "s/step" in line)
    row = next(line for line in section.lines if line.startswith("1 "))
    assert "GiB  host GiB  days" in header
    assert row[: header.index("host GiB") + len("host GiB")].endswith("12.0")
    assert section.values["best"][0]["memory"]["host"] == 12 * GIB
    less = replace(search(config, 64, memory_of, time_of, 71 * GIB, kept), without_host=5)
    section = report(less, question(), 1.5)
    assert "5 need more host memory than there is, " in section.text
    assert section.values["without_host"] == 5
    assert "host GiB" not in section.text


def test_the_cost_is_that_of_all_steps_of_the_run(found):
    config = load_config("gpt_8b")
    spent = cost(found.ranked[0], 64, question(price=2.5))
    hours = 300_000 * found.ranked[0].time.total / 3600
    assert spent.days == pytest.approx(hours / 24)
    assert spent.gpu_hours == pytest.approx(64 * hours)
    assert spent.money == pytest.approx(2.5 * 64 * hours)
    assert run_tokens(config) == 300_000 * 512 * 1024
    text = report(found, question(price=2.5), 1.5).text
    assert f"157,286,400,000 tokens in 300,000 steps: {spent.days:.3g} days, {spent.gpu_hours:,.0f} GPU-hours, " in text
    row = next(line for line in text.splitlines() if line.startswith("1 ")).split()
    assert {f"{spent.days:.3g}", f"{spent.gpu_hours:,.0f}", f"{spent.money:,.0f}"} < set(row)
    assert f"{spent.money:,.0f} at 2.5 a GPU-hour" in text
    assert cost(found.ranked[0], 64, question()).money is None


def test_json_holds_the_same_as_plain_values(found):
    values = json.loads(json.dumps(report(found, question(price=2.0), 1.5, "best.py").values))
    assert (values["tried"], values["too_big"]) == (found.tried, len(found.too_big))
    assert (values["devices"], values["global_batch"], values["written"]) == (64, 512, "best.py")
    first = values["best"][0]
    assert len(values["best"]) == 3
    assert first["mesh.pipe"] == found.ranked[0].config.mesh.pipe
    assert first["seconds"] == sum(first["parts"].values()) == found.ranked[0].time.total
    assert first["memory"]["total"] == found.ranked[0].memory.total
    assert first["money"] == pytest.approx(2 * first["gpu_hours"])
    assert {other["field"] for other in values["alternatives"]} >= {"mesh.pipe", "mesh.model", "train.recompute"}
    assert values["own"] is None  # its own mesh is for 512


def test_the_config_itself_is_placed_among_the_candidates(found):
    own = found.ranked[6].config
    section = report(found, question(config=own), 1.5)
    assert section.values["own"] == {"rank": 7, "seconds": found.ranked[6].time.total}
    assert "the config's own mesh, pipe " in section.text
    assert "rank 7" in section.text
    big, size = found.too_big[0]
    assert f"{size / GIB:.1f} GiB, which is too big" in report(found, question(config=big), 1.5).text


def test_with_one_rank_of_model_the_config_itself_is_found_whether_it_asks_for_sequence_parallelism_or_not(found):
    own = next(each.config for each in found.ranked if each.config.mesh.model == 1)
    flipped = replace(own, mesh=replace(own.mesh, sequence_parallel=not own.mesh.sequence_parallel))
    reports = [report(found, question(config=config), 1.5) for config in (own, flipped)]
    assert reports[0].values["own"] == reports[1].values["own"] is not None
    assert reports[0].text == reports[1].text


def test_what_leaves_little_memory_free_is_never_first_without_a_warning(found):
    other, _ = found.too_big[0]
    fast = Candidate(other, Bytes(0, 0.98 * found.capacity), Seconds(0.1, 0, 0))
    words = report(replace(found, tight=[fast]), question(), 1.5).text
    assert "not ranked, because it leaves 2.0% of the memory free and the prediction may be off by 5%: pipe " in words
    assert "warning" not in words
    assert "not ranked" not in report(replace(found, tight=[]), question(), 1.5).text
    own = report(replace(found, tight=[fast]), question(config=fast.config), 1.5)
    assert "not ranked: it leaves 2.0% of the memory free" in own.text

    nothing_else = replace(found, roomy=[], tight=[fast])
    section = report(nothing_else, question(), 1.5)
    assert section.values["tight"] == 1
    assert "warning: no way to run it leaves 5% of the memory free, by which the prediction may be off" in section.text
    assert "the best leaves 2.0% and may not fit" in section.text
    assert "memory, 2.0% free" in section.text


def test_what_holds_a_candidate_back_is_its_largest_parts_and_memory_that_is_almost_full():
    candidate = Candidate(load_config("gpt_8b"), Bytes(50, 48), Seconds(6, 3, 1))
    roomy, tight = (Found(1, capacity, [candidate], [], []) for capacity in (200, 100))
    assert held_back_by(candidate, roomy) == "model 30%, bubble 10%"
    assert held_back_by(candidate, tight) == "model 30%, bubble 10%, memory, 2.0% free"
    assert held_back_by(replace(candidate, time=Seconds(6, 0, 2)), roomy) == "bubble 25%"


def test_the_first_is_compared_with_the_second_part_by_part():
    first = Candidate(load_config("gpt_8b"), Bytes(1, 1), Seconds(6, 3, 1))
    second = replace(first, time=Seconds(5.5, 4, 1.001))
    assert faster_by(first, second) == "2 takes 501.0 ms more (model +1,000.0 ms, matmul -500.0 ms)"
    assert faster_by(first, first) == "the same time to four digits; the simpler one comes first"


def test_attention_dropout_that_rules_out_the_fast_kernel_is_said(found):
    best = found.ranked[0]
    without = replace(best.config, model=replace(best.config.model, attention_dropout=0.0))
    change = time_of(without).total / best.time.total - 1
    assert -0.11 < change < -0.05
    remark = f"with --model.attention-dropout 0 the best would take {-change:.1%} less time"
    assert remark in report(found, question(), 1.5).text
    assert "attention dropout" not in report(found, question(kernel_of=lambda config: "xla"), 1.5).text
