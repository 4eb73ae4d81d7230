"""A config that exceeds a GPU's memory is rejected before it is compiled, with changes that fit."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from mjax.cluster import launch
from mjax.cluster.hardware import USABLE_FRACTION
from mjax.cluster.launch import claim_gpu_memory
from mjax.commands import cli
from mjax.config import load_config
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.planner import command as fit
from mjax.planner.command import check_local_gpus, check_memory
from mjax.planner.memory import HEADROOM, predict_memory
from mjax.planner.search import changes_that_fit
from mjax.utils.figures import GIB
from tests.conftest import ROOT
from tests.planner.configs import changed
from tests.products import one_in

TINY = ["train", "--config", str(ROOT / "tests" / "tiny_config.py")]
SIXTEEN = ["--mesh.data", "8", "--mesh.model", "2", "--train.micro-batch", "1"]  # the simulated devices of this process


@pytest.mark.parametrize(
    ("name", "gib"),
    # Of 9 GiB --mesh.zero 1 would leave 2% free.
    [("gpt_8b", 9), *one_in(1, [("bloom_176b", 48), ("bert_4b", 12)], pytest.mark.ci)],
)
def test_proposals_fit_run_and_differ(monkeypatch, name, gib):
    """And their flags, typed, make their configs."""
    seen = []
    monkeypatch.setattr("mjax.commands.plan.run_plan", lambda arguments: seen.append(arguments.settings) or 0)
    config = load_config(name)
    assert predict_memory(config).total > gib * GIB
    changes = changes_that_fit(config, gib * GIB)
    assert len(changes) == 3
    assert [change.price for change in changes] == sorted(change.price for change in changes)
    for change in changes:
        assert predict_memory(change.config) == change.memory
        assert change.memory.total <= (1 - HEADROOM) * gib * GIB
        validate(changed(change.config, data={"mock": True}))
        assert (change.config.train.global_batch, change.config.model) == (config.train.global_batch, config.model)
        assert cli.main(["plan", "--config", name, *change.flags.split()]) == 0
    assert seen == [change.config for change in changes]
    words = [set(change.flags.split(" --")) for change in changes]
    assert not any(a < b for a in words for b in words)


def test_refusal_and_warning_have_numbers():
    config, gpu = changed(load_config("gpt_8b"), train={"unroll": "off"}), "NVIDIA H100 80GB HBM3"
    total = predict_memory(config).total
    with pytest.raises(UsageError) as refused:
        check_memory(config, 16 * GIB, gpu, "gpt_8b")
    message = str(refused.value)
    assert message.startswith(f"gpt_8b needs {total / GIB:.1f} GiB per GPU (optimizer state 7.8, weights 5.8, activ")
    assert "cheapest first: --mesh.zero 1" in message
    assert check_memory(config, total / 0.949, gpu) == ""
    assert "which leaves 1.0%; the prediction may be off by 5%, so it may not fit; " in check_memory(
        config, total / 0.99, gpu
    )


def test_xla_gets_share_of_memory(monkeypatch):
    """It may pin as much host memory as there is, if that is more than its default."""
    for gib, limit in ((32, {}), (2000, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "2000"})):
        monkeypatch.setattr(launch, "host_memory", lambda gib=gib: gib * GIB)
        environment = {}
        claim_gpu_memory(environment)
        assert environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(USABLE_FRACTION)} | limit


# --- Before training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable", "flags", "code", "words"),
    [
        (1e5, SIXTEEN, 2, "and cpu has 0.0 GiB usable"),
        (1e5, [*SIXTEEN, "--force"], 0, "continuing because of --force"),
        (1e12, SIXTEEN, 0, ""),
        # Other devices than the mesh needs are refused in loop.train, not here.
        (1e5, ["--mesh.data", "4", "--train.micro-batch", "1"], 0, ""),
    ],
    ids=["too large", "forced", "fits", "other devices"],
)
def test_training_begins_only_if_it_fits(monkeypatch, tmp_path, capsys, usable, flags, code, words):
    train = Mock(return_value=SimpleNamespace(exit_code=0))
    monkeypatch.setattr(fit, "usable_memory", lambda device: usable)
    monkeypatch.setattr("mjax.planner.search.changes_that_fit", lambda *_, **__: [])
    monkeypatch.setattr("mjax.run.loop.train", train)
    assert cli.main([*TINY, *flags, "--runs", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert words in shown.err + shown.out
    assert train.call_count == (code == 0)
    if code:
        assert not list(tmp_path.iterdir())


def test_gpu_at_hand_limits_kernel_and_host_memory(monkeypatch):
    devices = jax.device_count()
    config = changed(load_config("gpt_345m"), model={"attention_dropout": 0.0}, mesh={"data": devices})
    config = changed(config, train={"recompute": "none"})
    monkeypatch.setattr(fit, "usable_memory", lambda device: predict_memory(config).total / 0.94)
    monkeypatch.setattr(fit, "gpu_capability", lambda device: (9, 0))
    check_local_gpus(config, "gpt_345m", False, pytest.fail)
    monkeypatch.setattr(fit, "gpu_capability", lambda device: (7, 0))
    with pytest.raises(UsageError, match="gpt_345m needs"):
        check_local_gpus(config, "gpt_345m", False, pytest.fail)

    config = changed(config, train={"recompute": "offload", "micro_batch": 8, "global_batch": 8 * devices})
    memory = predict_memory(config)
    monkeypatch.setattr(fit, "usable_memory", lambda device: 2 * memory.total)
    monkeypatch.setattr(fit, "gpu_capability", lambda device: (9, 0))
    monkeypatch.setattr(fit, "host_memory", lambda: int(devices * memory.host))
    check_local_gpus(config, "gpt_345m", False, pytest.fail)
    monkeypatch.setattr(fit, "host_memory", lambda: int(devices * memory.host) - 1)
    with pytest.raises(UsageError, match=r"gpt_345m stores 0.4 GiB of activations per GPU in host memory, and"):
        check_local_gpus(config, "gpt_345m", False, pytest.fail)
