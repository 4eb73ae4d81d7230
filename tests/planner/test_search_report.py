"""What the search prints and hands over, from made-up memory and time."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from mjax.config import load_config
from mjax.hardware import GIB, gpu_named
from mjax.planner.search import Candidate, Found, search
from mjax.planner.search_report import Question, faster_by, held_back_by, report
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
        """Of a run whose batch grows."""
        return 0.9 * self.total


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


def test_report_shows_fastest_cost_and_plain_values(found):
    section = report(found, question(price=2.5), 1.5, "best.py")
    first, tried, *_ = section.lines
    assert section.title == "Search: gpt_8b on 64 × h100"
    assert first == (
        f"{found.tried:,} ways to run it: {len(found.too_big):,} are too big for 71.0 GiB, "
        f"{len(found.tight):,} leave less than 5% of it free, {len(found.roomy):,} fit (1.5 s)"
    )
    best, values = found.ranked[0], json.loads(json.dumps(section.values))
    hours = 300_000 * best.time.mean / 3600
    assert run_tokens(load_config("gpt_8b")) == 300_000 * 512 * 1024
    text = f"157,286,400,000 tokens in 300,000 steps: {hours / 24:.3g} days, {64 * hours:,.0f} GPU-hours, "
    assert f"{text}{2.5 * 64 * hours:,.0f} at 2.5 a GPU-hour" in section.text
    rows = [line.split() for line in section.lines if line[:2] in ("1 ", "2 ", "3 ") and "before" not in line]
    mesh = best.config.mesh
    assert rows[0][:4] == ["1", str(mesh.pipe), str(mesh.data), str(mesh.model)]
    assert {f"{best.time.mean:.3g}", f"{hours / 24:.3g}", f"{64 * hours:,.0f}"} < set(rows[0])
    assert [len(rows), len(values["best"])] == [3, 3]
    assert (values["tried"], values["too_big"], values["written"]) == (found.tried, len(found.too_big), "best.py")
    assert values["best"][0]["mesh.pipe"] == mesh.pipe
    assert values["best"][0]["money"] == pytest.approx(2.5 * 64 * hours)
    assert values["best"][0]["seconds_at_global_batch"] == sum(values["best"][0]["parts"].values())
    assert {other["field"] for other in values["alternatives"]} >= {"mesh.pipe", "mesh.model", "train.recompute"}
    assert values["own"] is None  # its own mesh is for 512
    assert tried == ""


def test_host_memory_has_a_column_and_is_counted():
    config = load_config("gpt_8b")
    kept = ["mesh.zero", "mesh.schedule", "mesh.sequence_parallel", "train.recompute", "train.micro_batch"]
    own = replace(config, train=replace(config.train, recompute="offload", micro_batch=4))
    section = report(search(own, 64, memory_of, time_of, 71 * GIB, kept, host=12 * GIB), question(config=own), 1.5)
    header = next(line for line in section.lines if "s/step" in line)
    row = next(line for line in section.lines if line.startswith("1 "))
    assert row[: header.index("host GiB") + len("host GiB")].endswith("12.0")
    assert section.values["best"][0]["memory"]["host"] == 12 * GIB


def test_own_config_has_its_rank(found):
    """Also where it asks for sequence parallelism that one rank of `model` cannot have."""
    own = next(each.config for each in found.ranked if each.config.mesh.model == 1)
    rank = [each.config for each in found.ranked].index(own) + 1
    flipped = replace(own, mesh=replace(own.mesh, sequence_parallel=not own.mesh.sequence_parallel))
    reports = [report(found, question(config=config), 1.5) for config in (own, flipped)]
    assert reports[0].values["own"] == {"rank": rank, "seconds": found.ranked[rank - 1].time.mean}
    assert f"rank {rank}" in reports[0].text == reports[1].text
    big, size = found.too_big[0]
    assert f"{size / GIB:.1f} GiB, which is too big" in report(found, question(config=big), 1.5).text


def test_tight_candidate_comes_with_a_warning(found):
    other, _ = found.too_big[0]
    fast = Candidate(other, Bytes(0, 0.98 * found.capacity), Seconds(0.1, 0, 0))
    words = report(replace(found, tight=[fast]), question(), 1.5).text
    assert "not ranked, because it leaves 2.0% of the memory free and the prediction may be off by 5%: pipe " in words
    assert "warning" not in words
    section = report(replace(found, roomy=[], tight=[fast]), question(), 1.5)
    assert "warning: no way to run it leaves 5% of the memory free, by which the prediction may be off" in section.text
    assert "memory, 2.0% free" in section.text


def test_candidate_is_explained_by_its_parts():
    candidate = Candidate(load_config("gpt_8b"), Bytes(50, 48), Seconds(6, 3, 1))
    roomy, tight = (Found(1, capacity, [candidate], [], []) for capacity in (200, 100))
    assert held_back_by(candidate, roomy) == "model 30%, bubble 10%"
    assert held_back_by(candidate, tight) == "model 30%, bubble 10%, memory, 2.0% free"
    second = replace(candidate, time=Seconds(5.5, 4, 1.001))
    assert faster_by(candidate, second).endswith("model +1,000.0 ms, matmul -500.0 ms)")
    assert faster_by(candidate, candidate) == "the same time to four digits; the simpler one comes first"
