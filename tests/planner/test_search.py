"""The planner's search on spaces small enough to try everything, with made-up memory and time."""

import hashlib
import math
from dataclasses import replace
from itertools import product

import pytest

from mjax.config import Config, GPTConfig, MeshConfig, MixtureConfig, TrainConfig
from mjax.config.checks import validate
from mjax.config.model import convert_kind
from mjax.errors import UsageError
from mjax.planner.command import check_searchable, enough_devices, reject_out_of_memory
from mjax.planner.memory import HEADROOM, Memory, predict_memory
from mjax.planner.search import LOSS_CHUNKS, MAX_SLOWDOWN, candidates, divide_by_memory, search
from mjax.planner.time import StepTime
from tests.planner.configs import changed

SMALL = Config(
    model=GPTConfig(layers=4, hidden=32, heads=4, sequence=4, vocabulary=257, vocabulary_multiple=64),
    train=TrainConfig(steps=100, global_batch=8, micro_batch=1),
)
SMALL = replace(SMALL, data=replace(SMALL.data, mock=True))


def bytes_of(total, moment="backward", host=0.0):
    return Memory(total, 0.0, 0.0, host=host, moment=moment)


def seconds_of(total, mean=None):
    return StepTime({"matmul": total}, 0.0, 0.0, None, total if mean is None else mean)


def everything(config, devices, zeros=(0, 1, 3), recomputes=("none", "selective", "full", "offload"), experts=(1,)):
    """Every combination, also of settings that cannot run."""
    shapes = [shape for shape in product(range(1, devices + 1), repeat=3) if math.prod(shape) == devices]
    names = ("expert", "sequence_parallel", "schedule", "virtual_stages", "zero")
    others = product(experts, (False, True), ("1f1b",), range(1, config.model.layers + 1), zeros)
    for (shape, other), micro_batch, recompute in product(
        product(shapes, list(others)), range(1, config.train.global_batch + 1), recomputes
    ):
        train = replace(config.train, micro_batch=micro_batch, recompute=recompute)
        yield replace(config, mesh=MeshConfig(*shape, **dict(zip(names, other, strict=True))), train=train)


def runs(config):
    try:
        validate(config)
    except UsageError:
        return False
    return True


def splits_tokens(config):
    tokens = config.train.micro_batch * config.model.sequences * config.model.sequence
    return tokens % config.mesh.model == 0


def is_simplest(config):
    """True if no setting is without effect, and tokens are divided where possible."""
    mesh = config.mesh
    return (
        (mesh.pipe > 1 or mesh.schedule == "1f1b")
        and mesh.sequence_parallel == (mesh.model > 1 and splits_tokens(config))
        and (mesh.data > 1 or mesh.zero == 0)
    )


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        changed(SMALL, model={"feed_forward": 6, "vocabulary": 250, "vocabulary_multiple": 2}),
        changed(SMALL, train={"batch_rampup": (4, 2, 20)}),
        replace(
            SMALL,
            model=replace(convert_kind(SMALL.model, "bert_task"), head="multiple_choice", num_labels=3, sequence=5),
        ),
        replace(
            SMALL, model=replace(convert_kind(SMALL.model, "llama"), kv_heads=1, window=2, global_attention_interval=2)
        ),
        replace(SMALL, model=MixtureConfig(layers=2, hidden=32, heads=4, experts=6, sequence=4, vocabulary=257)),
    ],
    ids=["gpt", "odd widths", "ramp-up", "bert", "pattern of windows", "mixture"],
)
def test_candidates_are_all_that_can_run(config):
    made = list(candidates(config, 4, ["mesh.zero", "train.recompute"]))
    experts = (1, 2, 3, 4) if config.model.kind == "mixture" else (1,)
    tried = everything(config, 4, zeros=[0], recomputes=["none"], experts=experts)
    assert len(made) == len(set(made)) > 8
    assert set(made) == {each for each in tried if is_simplest(each) and runs(each)}


def test_kept_fields_stay_as_in_config():
    config = changed(SMALL, mesh={"model": 2, "zero": 1, "schedule": "gpipe"}, train={"micro_batch": 2})
    keep = ["mesh.model", "mesh.zero", "mesh.schedule", "train.micro_batch"]
    made = [(each.mesh, each.train.micro_batch) for each in candidates(config, 4, keep)]
    assert {(mesh.model, mesh.zero, mesh.schedule, size) for mesh, size in made} == {(2, 1, "gpipe", 2)}
    assert {mesh.pipe for mesh, _ in made} == {1, 2}


def drawn(config, salt):
    """A number in [0, 1) that depends on everything in which candidates differ."""
    digest = hashlib.sha256(repr((salt, config.mesh, config.train)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def memory_of(config):
    return bytes_of(100 * drawn(config, "memory"))


def time_of(config):
    return seconds_of(1 + drawn(config, "time"), 1 + drawn(config, "mean"))


@pytest.mark.parametrize("capacity", [pytest.param(3.0, marks=pytest.mark.ci), 60.0])
def test_search_finds_what_exhaustion_finds(capacity):
    found = search(SMALL, 4, memory_of, time_of, capacity, top=10**6)
    every = [each for each in everything(SMALL, 4) if is_simplest(each) and runs(each)]
    sizes = [memory_of(each).total for each in every]
    roomy = [each for each, size in zip(every, sizes, strict=True) if size <= 0.95 * capacity]
    assert 0 < len(roomy) <= len(every)
    assert found.ranked[0].config == min(roomy, key=lambda each: time_of(each).mean)
    assert (found.tried, len(found.ranked), len(found.out_of_memory)) == (
        len(every),
        len(roomy),
        len(every) - len(roomy),
    )
    seconds = [float(f"{each.time.mean:.4g}") for each in found.ranked]
    assert seconds == sorted(seconds)
    few = search(SMALL, 4, memory_of, time_of, capacity, top=3)
    within = [each for each in found.ranked if each.time.mean <= MAX_SLOWDOWN * found.ranked[0].time.mean]
    assert few.ranked == found.ranked[: max(3, len(within))]
    assert few.tried == found.tried


@pytest.mark.parametrize(
    "kind", [{}, pytest.param({"experts": 4, "first_dense_layers": 1}, marks=pytest.mark.ci)], ids=["gpt", "mixture"]
)
def test_least_memory_leaves_out_no_candidate_that_fits(kind):
    mixture = replace(convert_kind(SMALL.model, "mixture"), **kind) if kind else SMALL.model
    config = replace(SMALL, model=mixture)
    among = list(candidates(config, 4))
    needed = {candidate: predict_memory(candidate) for candidate in among}
    capacity = sorted(memory.total for memory in needed.values())[len(among) // 2]
    limit = (1 - HEADROOM) * capacity
    possible, excluded = divide_by_memory(among, lambda config: predict_memory(config, least=True).total, limit)
    assert excluded
    assert {*possible} >= {candidate for candidate in among if needed[candidate].fits(capacity)}
    assert all(least <= needed[candidate].total for candidate, least in excluded)


def test_search_tries_loss_in_chunks():
    def logits(config):
        moment = "head" if config.train.recompute == "full" else "backward"
        return bytes_of(90 + config.train.micro_batch - 30 * (config.train.loss_chunks > 1), moment)

    def seconds(config):
        return seconds_of(2 + 0.1 * (config.train.loss_chunks > 1))

    found = search(SMALL, 4, logits, seconds, 100)  # 95 are roomy: micro-batches of up to 4
    trains = [each.config.train for each in found.ranked if each.config.train.loss_chunks > 1]
    assert {(each.micro_batch, each.recompute, each.loss_chunks) for each in trains} == {(8, "full", LOSS_CHUNKS)}
    assert found.ranked[0].config.train.loss_chunks == 1
    kept = search(SMALL, 4, logits, seconds, 100, ["train.loss_chunks"])
    assert {each.config.train.loss_chunks for each in kept.ranked} == {1}
    own = changed(SMALL, train={"loss_chunks": 2})
    assert {each.train.loss_chunks for each in candidates(own, 4)} == {1, 2}
    task = replace(SMALL, model=convert_kind(SMALL.model, "bert_task"))  # no scores of a vocabulary
    assert {each.config.train.loss_chunks for each in search(task, 4, logits, seconds, 100).ranked} == {1}


def test_candidates_beyond_host_memory_are_left_out():
    def memory(config):
        return bytes_of(1, host=float(config.train.micro_batch) if config.train.recompute == "offload" else 0.0)

    unknown, known = (search(SMALL, 4, memory, time_of, 2, host=host, top=10**6) for host in (None, 2.0))
    offloaded = [each for each in known.ranked if each.config.train.recompute == "offload"]
    assert {each.config.train.micro_batch for each in offloaded} == {1, 2}
    assert len(unknown.out_of_memory) == 0 < len(known.out_of_memory) == len(unknown.ranked) - len(known.ranked)
    kept = changed(SMALL, train={"recompute": "offload"})
    found = search(kept, 4, memory, time_of, 2, ["train.recompute"], host=0.5)
    with pytest.raises(UsageError, match="needs more host memory than there is; leave out --fix"):
        reject_out_of_memory(found, kept, "small", "h100", memory, ["train.recompute"])


def test_simplest_of_equal_times_comes_first():
    found = search(SMALL, 4, lambda _: bytes_of(1), lambda config: seconds_of(2 + 1e-5 * drawn(config, "noise")), 2)
    best = found.ranked[0].config
    assert best.mesh == MeshConfig(data=4)
    assert (best.train.micro_batch, best.train.recompute) == (1, "none")


@pytest.mark.parametrize(
    ("devices", "instead"),
    [(12, "use 8 or 16, or set --devices-per-node"), (7, "use --devices 4 or 8"), (1024, "128$")],
)
def test_impossible_devices_are_rejected_with_possible_ones(devices, instead):
    with pytest.raises(UsageError, match=f"--devices {devices} .*{instead}"):
        check_searchable(SMALL, devices, 8, [])


def test_refusal_names_smallest_and_enough_gpus():
    def shared(config):
        mesh = config.mesh
        return bytes_of(2**30 * (800 / mesh.devices + config.train.micro_batch + (mesh.zero == 0)))

    found = search(SMALL, 8, shared, time_of, 30 * 2**30)
    with pytest.raises(UsageError) as refused:
        reject_out_of_memory(found, SMALL, "small", "h100", shared, [])
    assert "takes 101.0 GiB of 30.0, of which 5% must stay free; use --devices 32, where it fits" in str(refused.value)
    assert enough_devices(SMALL, 8, shared, 27.5 * 2**30) == 32
    assert enough_devices(SMALL, 8, shared, 27 * 2**30) == 64  # 32 would leave less than 5% free
    assert enough_devices(SMALL, 8, shared, 2**30) is None
