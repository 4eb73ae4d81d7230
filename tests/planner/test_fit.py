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
from mjax.planner.memory import memory_of, predict_memory
from mjax.planner.memory_section import memory_section
from mjax.validation import validate
from tests.conftest import ROOT

CASES = [("gpt_8b", 16), ("gpt_8b", 18), ("gpt_1b", 12), ("gpt_175b", 24), ("bloom_176b", 48), ("bert_4b", 12)]
TINY = ["train", "--config", str(ROOT / "tests" / "tiny_config.py")]
SIXTEEN = ["--mesh.data", "8", "--mesh.model", "2", "--train.micro-batch", "1"]  # the simulated devices of this process


@pytest.mark.parametrize(("name", "gib"), CASES)
def test_every_proposal_fits_runs_and_is_no_part_of_another(name, gib):
    config = load_config(name)
    assert predict_memory(config).total > gib * GIB
    changes = changes_that_fit(config, gib * GIB)
    assert 1 <= len(changes) <= 3
    assert [change.price for change in changes] == sorted(change.price for change in changes)
    for change in changes:
        assert predict_memory(change.config) == change.memory
        assert change.memory.total <= gib * GIB
        validate(replace(change.config, data=replace(change.config.data, mock=True)))
        assert change.config.train.global_batch == config.train.global_batch
        assert change.config.model == config.model
    words = [set(change.flags.split(" --")) for change in changes]
    assert not any(a < b for a in words for b in words)


def test_what_costs_nothing_is_proposed_first():
    changes = changes_that_fit(whole_rows(load_config("gpt_8b")), 22 * GIB)
    assert changes[0].flags == "--mesh.sequence-parallel"
    assert changes[1].flags == "--mesh.zero 1"


def test_the_flags_of_a_proposal_make_its_config(monkeypatch):
    seen = []
    monkeypatch.setattr("mjax.commands.plan.run_plan", lambda arguments: seen.append(arguments.settings) or 0)
    changes = changes_that_fit(load_config("gpt_1b"), 12 * GIB)
    for change in changes:
        assert cli.main(["plan", "--config", "gpt_1b", *change.flags.split()]) == 0
    assert seen == [change.config for change in changes]


def test_a_refusal_is_one_sentence_with_numbers():
    with pytest.raises(UsageError) as refused:
        check_memory(load_config("gpt_8b"), 18 * GIB, "NVIDIA H100 80GB HBM3", "gpt_8b")
    message = str(refused.value)
    total = predict_memory(load_config("gpt_8b")).total / GIB
    parts = "optimizer 7.8, parameters 5.8, activations 4.2, "
    assert message.startswith(f"gpt_8b needs {total:.1f} GiB on each GPU ({parts}")
    assert "18.0 GiB of NVIDIA H100 80GB HBM3 are usable" in message
    assert "cheapest first: --mesh.zero 1 (" in message
    assert "\n" not in message
    assert check_memory(load_config("gpt_8b"), 22 * GIB, "NVIDIA H100 80GB HBM3") == ""


def test_what_fits_and_leaves_under_five_percent_is_warned_of_with_what_leaves_more():
    config, total = load_config("gpt_8b"), predict_memory(load_config("gpt_8b")).total
    warning = check_memory(config, total / 0.99, "NVIDIA H100 80GB HBM3", "gpt_8b")
    assert warning.startswith("gpt_8b is predicted to need 20.3 of the 20.5 GiB that are usable on NVIDIA H100 80GB")
    assert "which leaves 1.0%; the prediction may be off by 5%, so it may not fit; " in warning
    assert "cheapest first: --mesh.zero 1 (" in warning
    assert check_memory(config, total / 0.949, "a GPU") == ""
    small = replace(gpu_named("h100"), memory_bytes=total / 0.99 / USABLE_FRACTION)
    section = memory_section(config, small)
    assert "it may not fit into the 20.5 GiB that are usable on h100: 1.0% are left free, and the " in section.text
    assert (section.values["fits"], section.values["free"]) == (True, pytest.approx(0.01))
    assert section.values["changes"][0]["flags"] == "--mesh.zero 1"


def test_memory_that_jax_was_not_told_to_take_is_pointed_at(monkeypatch):
    for name in MEMORY_FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"24\.0 with XLA_PYTHON_CLIENT_MEM_FRACTION=0\.9 in the environment"):
        check_memory(load_config("gpt_8b"), 20 * GIB, "a GPU")
    for name in MEMORY_FRACTIONS:
        with monkeypatch.context() as context:
            context.setenv(name, "0.5")
            with pytest.raises(UsageError) as refused:
                check_memory(load_config("gpt_8b"), 20 * GIB, "a GPU")
        assert "FRACTION" not in str(refused.value)


def test_xla_is_given_the_share_of_the_memory_that_a_plan_counts_with_unless_the_user_has_said(monkeypatch):
    monkeypatch.setattr(launch, "host_memory", lambda: 32 * GIB)
    environment = {}
    claim_gpu_memory(environment)
    assert environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(USABLE_FRACTION)}
    for name in MEMORY_FRACTIONS:  # JAX refuses both at once
        environment = {name: "0.5"}
        claim_gpu_memory(environment)
        assert environment == {name: "0.5"}


def test_xla_may_pin_as_much_host_memory_as_there_is_if_that_is_more_than_its_default(monkeypatch):
    monkeypatch.setattr(launch, "host_memory", lambda: 2000 * GIB)
    environment = {MEMORY_FRACTIONS[0]: "0.5"}
    claim_gpu_memory(environment)
    assert environment == {MEMORY_FRACTIONS[0]: "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "2000"}
    environment |= {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}
    claim_gpu_memory(environment)
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "100"


def test_a_gpu_says_what_may_be_allocated_and_a_cpu_refuses_nothing():
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 2**36})
    assert memory_of(gpu) == (2**36, "NVIDIA H200")
    assert memory_of(SimpleNamespace(platform="gpu", device_kind="?", memory_stats=lambda: None)) is None
    assert memory_of(jax.local_devices()[0]) is None


def planted(monkeypatch, usable):
    """GPUs with `usable` bytes in the place of this process' devices; whether training was begun."""
    begun = []
    monkeypatch.setattr(fit, "memory_of", lambda device: (usable, "NVIDIA V100"))

    def train(*_, **__):
        begun.append(True)
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr("mjax.training.loop.train", train)
    return begun


def test_training_that_does_not_fit_is_refused_before_it_begins(monkeypatch, tmp_path, capsys):
    begun = planted(monkeypatch, 1e5)
    assert cli.main([*TINY, *SIXTEEN, "--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "of NVIDIA V100 are usable" in error
    assert error.endswith("--force tries it anyway\n")
    assert error.count("\n") == 1
    assert not begun
    assert not list(tmp_path.iterdir())


def test_force_goes_on_and_says_so(monkeypatch, tmp_path, capsys):
    begun = planted(monkeypatch, 1e5)
    assert cli.main([*TINY, *SIXTEEN, "--runs", str(tmp_path), "--force"]) == 0
    assert "continuing because of --force" in capsys.readouterr().out
    assert begun


def test_the_gpu_at_hand_is_asked_for_its_attention_kernel(monkeypatch):
    config = load_config("gpt_345m")
    config = replace(
        config, model=replace(config.model, attention_dropout=0.0), mesh=replace(config.mesh, data=jax.device_count())
    )
    monkeypatch.setattr(fit, "memory_of", lambda device: (predict_memory(config).total / 0.94, "a GPU"))
    check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)
    monkeypatch.setattr(fit, "capability_of", lambda device: (7, 0))
    with pytest.raises(UsageError, match="gpt_345m needs"):
        check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)


def test_activations_that_do_not_fit_into_this_machines_memory_are_refused(monkeypatch):
    config = load_config("gpt_345m")
    train = replace(config.train, recompute="offload", micro_batch=8)
    config = replace(config, train=train, mesh=replace(config.mesh, data=jax.device_count()))
    config = replace(config, train=replace(train, global_batch=8 * jax.device_count()))
    memory = predict_memory(config)
    monkeypatch.setattr(fit, "memory_of", lambda device: (2 * memory.total, "NVIDIA V100"))
    monkeypatch.setattr(fit, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(fit, "host_memory", lambda: int(jax.device_count() * memory.host))
    check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)
    monkeypatch.setattr(fit, "host_memory", lambda: int(jax.device_count() * memory.host) - 1)
    with pytest.raises(
        UsageError, match=r"gpt_345m keeps 0.4 GiB of activations in host memory for each GPU, and this"
    ):
        check_gpu_at_hand(config, "gpt_345m", False, pytest.fail)


def test_a_proposal_says_what_it_takes_of_host_memory_and_takes_no_more_than_there_is():
    config = load_config("llama3_8b_128k")
    usable = predict_memory(replace(config, train=replace(config.train, recompute="offload"))).total / 0.94
    offload = next(each for each in changes_that_fit(config, usable) if "offload" in each.flags)
    assert offload.needs(config) == "30.4 GiB and 4.0 GiB of host memory"
    assert not [each for each in changes_that_fit(config, usable, host=2**30) if "offload" in each.flags]


def test_training_that_hardly_fits_begins_with_a_warning(monkeypatch, tmp_path, capsys):
    config = load_config(TINY[-1])
    config = replace(config, mesh=replace(config.mesh, data=8, model=2), train=replace(config.train, micro_batch=1))
    begun = planted(monkeypatch, predict_memory(config).total / 0.98)
    assert cli.main([*TINY, *SIXTEEN, "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "which leaves 2.0%; the prediction may be off by 5%, so it may not fit; " in printed
    assert begun


@pytest.mark.parametrize(("usable", "mesh"), [(1e12, SIXTEEN), (1e5, ["--mesh.data", "4"])])
def test_training_that_fits_or_has_other_devices_begins(monkeypatch, tmp_path, usable, mesh):
    begun = planted(monkeypatch, usable)  # other devices than the mesh needs are refused in loop.train, not here
    assert cli.main([*TINY, *mesh, "--train.micro-batch", "1", "--runs", str(tmp_path)]) == 0
    assert begun


def test_a_plan_for_a_gpu_has_a_verdict_and_what_would_change_it():
    config = load_config("gpt_8b")
    roomy, tight, tiny = (
        replace(gpu_named("h100"), memory_bytes=size * GIB / USABLE_FRACTION) for size in (72, 18, 1e-3)
    )
    assert "it fits into the 72.0 GiB that are usable on h100" in memory_section(config, roomy).text
    section = memory_section(config, tight)
    assert "it does not fit into the 18.0 GiB" in section.text
    assert section.values["changes"][0]["flags"] == "--mesh.zero 1"
    first = changes_that_fit(config, 18 * GIB)[0].memory.total
    assert f"  --mesh.zero 1  →  {first / GIB:.1f} GiB" in section.lines
    assert "no change of mesh or recomputation makes it fit" in memory_section(config, tiny).text


def test_a_proposal_that_needs_more_gpus_says_how_many():
    config = load_config("gpt_8b")
    config = replace(config, mesh=replace(config.mesh, data=1, model=4), train=replace(config.train, global_batch=8))
    (change, *_) = [each for each in changes_that_fit(config, 32 * GIB) if each.config.mesh.devices == 8]
    assert change.needs(config) == f"{change.memory.total / GIB:.1f} GiB on each of 8"
    assert change.needs(change.config) == f"{change.memory.total / GIB:.1f} GiB"
