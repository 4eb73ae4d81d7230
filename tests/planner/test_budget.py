"""`mjax plan --days`: the largest model that a budget of GPU time trains."""

import itertools
import json
import math
import shlex
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from mjax.cluster.hardware import gpu_named
from mjax.commands import cli
from mjax.commands.flags import parse
from mjax.commands.train import TrainArguments, choose_config
from mjax.config import load_config
from mjax.models.build import count_parameters
from mjax.planner.search import Budget, ModelSize, largest_model, size_grid, try_size, with_tokens
from tests.conftest import ROOT

H100 = gpu_named("h100")
LLAMA = load_config("llama3_8b")
llama_ladder = cache(lambda: size_grid(LLAMA))


def at_half_of_the_peak(config):
    """Found by a search in which every model runs at half of the peak of 64 H100s, counted by hand."""
    model = config.model
    h, s, kv = model.hidden, model.sequence, model.groups * model.head_size
    layer = 2 * h * h + 2 * h * kv + 3 * h * model.mlp_width  # q and out, k and v, gate, up and down
    forward = 2 * s * (model.layers * (layer + 2 * s * h) + model.padded_vocabulary * h)  # scores and their use: 2 s h
    step = 3 * forward * config.train.global_batch
    return SimpleNamespace(ranked=[SimpleNamespace(time=SimpleNamespace(mean=step / (64 * 0.5 * 989.4e12)))])


def test_largest_is_that_of_exhaustive_count():
    rungs = [rung for rung in llama_ladder() if 4096 <= rung.config.model.hidden <= 7168]
    budget, lines = Budget(64, H100, 30), []
    best, tried = largest_model(rungs, budget, at_half_of_the_peak, lines.append)
    days = {}
    for rung in rungs:
        tokens = 20 * count_parameters(rung.config.model)
        steps = math.ceil(tokens / (512 * 8192))
        days[rung.config.model] = at_half_of_the_peak(rung.config).ranked[0].time.mean * steps / 86_400
    assert [*days] == sorted(days, key=count_parameters)
    within = [model for model, each in days.items() if each <= 30]
    assert best.config.model == max(within, key=count_parameters)
    assert best.days == pytest.approx(days[best.config.model])
    assert best.tokens == best.config.train.steps * 512 * 8192
    # Half of the peak: the FLOPs of the traced model are those counted by hand.
    assert best.flops == pytest.approx(best.days * 86_400 * 64 * 0.5 * 989.4e12, rel=1e-9)
    assert len(tried) == len(lines) < 10


def test_ladder_has_close_rungs_of_same_proportions():
    models = [rung.config.model for rung in llama_ladder()]
    assert LLAMA.model in models
    for model in models:
        assert (model.head_size, model.groups, model.vocabulary) == (128, 8, 128256)
        assert model.mlp_width * 4096 == 14336 * model.hidden
        assert 70 <= model.hidden / model.layers <= 140
    middle = [count_parameters(model) for model in models if 4096 <= model.hidden <= 6144]
    assert all(0.95 < after / before < 1.2 for before, after in itertools.pairwise(middle))


def test_schedule_ends_with_tokens():
    config = with_tokens(replace(LLAMA, optimizer=replace(LLAMA.optimizer, decay_steps=500_000)), 10**10)
    assert (config.train.steps, config.optimizer.decay_steps) == (2385, None)
    assert config.optimizer.warmup_steps == 2_000
    assert with_tokens(LLAMA, 10**9).optimizer.warmup_steps < 239


def test_trial_counts_tokens_of_a_ramp_up():
    config = load_config("gpt_175b")  # from 16 to 1,536 sequences
    trial = try_size(ModelSize(config, count_parameters(config.model)), Budget(64, H100, 1e-9), None)
    assert 0 <= trial.tokens - 20 * trial.parameters < 1536 * 2048
    assert (trial.best, trial.days) == (None, math.inf)


@pytest.mark.ci
def test_plan_is_of_largest_and_its_command(tmp_path, capsys):
    """The budget is a few milliseconds of two GPUs."""
    file = tmp_path / "found.py"
    plan = ["plan", "--config", str(ROOT / "tests" / "tiny_config.py"), "--gpu", "h100", "--devices", "2", "--json"]
    assert cli.main([*plan, "--days", "0.0005", "--write", str(file)]) == 0
    written = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]["command"]
    assert written == f"python train.py --config {file}"
    assert cli.main([*plan, "--days", "0.0005"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    best, tried = plan["budget"]["best"], plan["budget"]["tried"]
    assert best in tried
    assert best["days"] <= 0.0005
    larger = [each for each in tried if each["parameters"] > best["parameters"]]
    assert larger
    assert all(each["days"] is None or each["days"] > 0.0005 for each in larger)
    assert plan["run"]["parameters"] == best["parameters"]
    assert plan["search"]["best"][0]["days"] == pytest.approx(best["days"])
    words = shlex.split(plan["run"]["command"].replace("PREFIX", "data/x"))[2:]
    typed = parse(TrainArguments, words, "python train.py", choose_config(words)).settings
    written = load_config(str(file))
    assert replace(typed, data=written.data) == written
    assert written.train.steps == best["steps"]


def test_sizes_of_a_mixture_keep_its_ratios():
    config = load_config("moe_demo")
    model = replace(config.model, moe_ffn_hidden=config.model.hidden // 2, shared_expert_ffn_hidden=config.model.hidden)
    sizes = {size.config.model for size in size_grid(replace(config, model=model))}
    assert len({each.hidden for each in sizes}) > 1
    assert all(2 * each.moe_ffn_hidden == each.shared_expert_ffn_hidden == each.hidden for each in sizes)
