"""What does not fit into the memory of a GPU is refused before it is compiled, with what would fit."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from benchmarks.published import whole_rows
from mjax import cli, launch
from mjax.config import load_config
from mjax.errors import UsageError
from mjax.hardware import GIB, USABLE_FRACTION, gpu_named
from mjax.launch import MEMORY_FRACTIONS, claim_gpu_memory
from mjax.planner import fit
from mjax.planner.fit import changes_that_fit, check_gpu_at_hand, check_memory
from mjax.planner.memory import HEADROOM, memory_of, predict_memory
from mjax.planner.memory_section import memory_section
from mjax.validation import validate
from tests.conftest import ROOT

TINY = ["train", "--config", str(ROOT / "tests" / "tiny_config.py")]
SIXTEEN = ["--mesh.data", "8", "--mesh.model", "2", "--train.micro-batch", "1"]  # the simulated devices of this process


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("gpt_8b", 16),
        pytest.param("bloom_176b", 48, marks=pytest.mark.ci),
        pytest.param("bert_4b", 12, marks=pytest.mark.ci),
    ],
)
def test_proposals_fit_run_and_differ(monkeypatch, name, gib):
    """And their flags, typed, make their configs."""
    seen = []
    monkeypatch.setattr("mjax.commands.plan.run_plan", lambda arguments: seen.append(arguments.settings) or 0)
    config = load_config(name)
    assert predict_memory(config).total > gib * GIB
    changes = changes_that_fit(config, gib * GIB)
    assert 1 <= len(changes) <= 3
    assert [change.price for change in changes] == sorted(change.price for change in changes)
    for change in changes:
        assert predict_memory(change.config) == change.memory
        assert change.memory.total <= (1 - HEADROOM) * gib * GIB
        validate(replace(change.config, data=replace(change.config.data, mock=True)))
        assert (change.config.train.global_batch, change.config.model) == (config.train.global_batch, config.model)
        assert cli.main(["plan", "--config", name, *change.flags.split()]) == 0
    assert seen == [change.config for change in changes]
    words = [set(change.flags.split(" --")) for change in changes]
    assert not any(a < b for a in words for b in words)


def test_what_costs_nothing_is_proposed_first():
    config = whole_rows(load_config("gpt_8b"))
    assert [each.flags for each in changes_that_fit(config, 22 * GIB)[:2]] == [
        "--mesh.sequence-parallel",
        "--mesh.zero 1",
    ]


def test_refusal_and_warning_have_numbers(monkeypatch):
    for name in MEMORY_FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    config, gpu = load_config("gpt_8b"), "NVIDIA H100 80GB HBM3"
    total = predict_memory(config).total
    with pytest.raises(UsageError) as refused:
        check_memory(config, 16 * GIB, gpu, "gpt_8b")
    message = str(refused.value)
    assert message.startswith(f"gpt_8b needs {total / GIB:.1f} GiB on each GPU (optimizer 7.8, parameters 5.8, activ")
    assert "cheapest first: --mesh.zero 1" in message
    assert check_memory(config, total / 0.949, gpu) == ""
    assert "which leaves 1.0%; the prediction may be off by 5%, so it may not fit; " in check_memory(
        config, total / 0.99, gpu
    )
    # Where JAX was not told to take what there is.
    hint = r"24\.0 with XLA_PYTHON_CLIENT_MEM_FRACTION=0\.9 in the environment"
    with pytest.raises(UsageError, match=hint):
        check_memory(config, 20 * GIB, "a GPU")


def test_plan_tells_whether_it_fits():
    config = load_config("gpt_8b")
    total = predict_memory(config).total

    def section(usable):
        return memory_section(config, replace(gpu_named("h100"), memory_bytes=usable / USABLE_FRACTION))

    roomy, tight, small = section(72 * GIB), section(total / 0.99), section(18 * GIB)
    assert "it fits into the 72.0 GiB that are usable on h100" in roomy.text
    assert "it may not fit into the 20.5 GiB" in tight.text
    assert (tight.values["fits"], tight.values["free"]) == (True, pytest.approx(0.01))
    assert "it does not fit into the 18.0 GiB" in small.text
    assert small.values["changes"][0]["flags"] == "--mesh.zero 1"


def test_proposal_tells_host_memory():
    long = load_config("llama3_8b_128k")
    usable = predict_memory(replace(long, train=replace(long.train, recompute="offload"))).total / 0.94
    offload = next(each for each in changes_that_fit(long, usable) if "offload" in each.flags)
    assert offload.needs(long) == "30.4 GiB and 4.0 GiB of host memory"
    assert not [each for each in changes_that_fit(long, usable, host=2**30) if "offload" in each.flags]


def test_xla_gets_share_of_memory_unless_told(monkeypatch):
    """It may pin as much host memory as there is, if that is more than its default."""
    monkeypatch.setattr(launch, "host_memory", lambda: 32 * GIB)
    environment = {}
    claim_gpu_memory(environment)
    assert environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(USABLE_FRACTION)}
    for name in MEMORY_FRACTIONS:  # JAX refuses both at once
        environment = {name: "0.5"}
        claim_gpu_memory(environment)
        assert environment == {name: "0.5"}
    monkeypatch.setattr(launch, "host_memory", lambda: 2000 * GIB)
    claim_gpu_memory(environment)
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "2000"


# --- Before training --------------------------------------------------------------------------------------------------


def test_memory_of_device_is_what_it_allocates():
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 2**36})
    assert memory_of(gpu) == (2**36, "NVIDIA H200")
    assert memory_of(SimpleNamespace(platform="gpu", device_kind="?", memory_stats=lambda: None)) is None
    assert memory_of(jax.local_devices()[0]) is None


@pytest.mark.parametrize(
    ("usable", "flags", "code", "words"),
    [
        (1e5, SIXTEEN, 2, "of NVIDIA V100 are usable"),
        (1e5, [*SIXTEEN, "--force"], 0, "continuing because of --force"),
        (1e12, SIXTEEN, 0, ""),
        # Other devices than the mesh needs are refused in loop.train, not here.
        (1e5, ["--mesh.data", "4", "--train.micro-batch", "1"], 0, ""),
    ],
    ids=["too large", "forced", "fits", "other devices"],
)
def test_training_begins_only_if_it_fits(monkeypatch, tmp_path, capsys, usable, flags, code, words):
    begun = []

    def train(*_, **__):
        begun.append(True)
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(fit, "memory_of", lambda device: (usable, "NVIDIA V100"))
    monkeypatch.setattr(fit, "changes_that_fit", lambda *_, **__: [])
    monkeypatch.setattr("mjax.training.loop.train", train)
    assert cli.main([*TINY, *flags, "--runs", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert words in shown.err + shown.out
    assert len(begun) == (code == 0)
    if code:
        assert not list(tmp_path.iterdir())


def test_gpu_at_hand_limits_kernel_and_host_memory(monkeypatch):
    devices = jax.device_count()
    config = load_config("gpt_345m")
    config = replace(
        config, model=replace(config.model, attention_dropout=0.0), mesh=replace(config.mesh, data=devices)
    )
    monkeypatch.setattr(fit, "memory_of", lambda device: (predict_memory(config).total / 0.94, "a GPU"))
    check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)
    monkeypatch.setattr(fit, "capability_of", lambda device: (7, 0))
    with pytest.raises(UsageError, match="gpt_345m needs"):
        check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)

    train = replace(config.train, recompute="offload", micro_batch=8, global_batch=8 * devices)
    config = replace(config, train=train)
    memory = predict_memory(config)
    monkeypatch.setattr(fit, "memory_of", lambda device: (2 * memory.total, "NVIDIA V100"))
    monkeypatch.setattr(fit, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(fit, "host_memory", lambda: int(devices * memory.host))
    check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)
    monkeypatch.setattr(fit, "host_memory", lambda: int(devices * memory.host) - 1)
    with pytest.raises(UsageError, match=r"gpt_345m keeps 0.4 GiB of activations in host memory for each GPU, and"):
        check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)
