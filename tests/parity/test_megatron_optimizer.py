"""Runs that move between mjax and megatron-core in the middle: the losses of the next steps are the same in both."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from mjax.checkpoint.arrays import open_array
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import read_manifest
from mjax.commands import cli
from mjax.config import MeshConfig, read_config, save_config
from mjax.interop.megatron.checkpoint import open_checkpoint
from mjax.parallel.mesh import make_mesh
from mjax.run.start import restore_state
from mjax.step.layout import with_kernel
from mjax.step.step import build_program
from tests.parity.megatron_written import convert
from tests.ports import free_port

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")

pytestmark = pytest.mark.parity

ROWS, BATCH, SEQUENCE = 128, 4, 10
CASES = {
    "gpt": {"form": "distributed"}, "llama": {"form": "plain"}, "mixtral": {"form": "plain"},
    "gpt torch": {"form": "torch"}, "llama torch": {"form": "torch", "bf16": True},
    "llama bf16": {"form": "distributed", "bf16": True},
    "buffers": {"form": "distributed", "sharding": "dp_reshardable"},
}  # fmt: skip


def draw_batches(file, seed, rows=ROWS):
    ids = np.random.default_rng(seed).integers(0, rows, (5, BATCH, SEQUENCE + 1))
    np.savez(file, tokens=ids[..., :-1], labels=ids[..., 1:])
    return str(file)


def train_megatron_core(folder, *requests):
    """Run `train_megatron_core.py`; returns the losses of each request."""
    files = [folder / f"request_{number}.json" for number in range(len(requests))]
    for file, request in zip(files, requests, strict=True):
        file.write_text(json.dumps({"rows": ROWS} | request))
    program = [sys.executable, str(Path(__file__).with_name("train_megatron_core.py")), *map(str, files)]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    process = subprocess.run(program, env=os.environ | environment, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-3000:]
    return [np.load(f"{request['batches']}.losses.npy") for request in requests]


def train_on(run, batches):
    """Take and save five more steps of a run on these batches; returns their losses."""
    program = build_program(with_kernel(read_config(run / "config.json")), make_mesh(MeshConfig(), jax.devices()[:1]))
    arrays, losses = dict(np.load(batches)), []
    with Checkpoints(run / "checkpoints", on_notice=lambda line: None) as checkpoints:
        first, state = restore_state(checkpoints, program, None, print)
        for step in range(5):
            batch = {name: array[step].astype(np.int32) for name, array in arrays.items()}
            state, metrics = program.train_step(state, program.put_on_devices(batch))
            losses.append(float(metrics.loss))
        checkpoints.save(first + 5, state, last=True)
    return losses


def state_of(run):
    """The arrays of the newest checkpoint by name."""
    folder = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    names = read_manifest(folder)["arrays"]
    return {name: np.asarray(open_array(folder / name.split(".")[0], name).read().result()) for name in names}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a checkpoint of each case after five steps, `CASE.next.npz` and the losses of megatron-core."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-ci")
    folder = tmp_path_factory.mktemp("written")
    requests = []
    for number, (case, request) in enumerate(CASES.items()):
        kind = "gpt" if case == "buffers" else case.split()[0]
        begun = draw_batches(folder / f"{case}.npz", number)
        requests.append({"kind": kind, "batches": begun, "save": str(folder / case), **request})
        if case != "buffers":
            following = draw_batches(folder / f"{case}.next.npz", number + 10)
            requests.append({"kind": kind, "batches": following, "load": str(folder / case), **request})
    train_megatron_core(folder, *requests)
    return folder


@pytest.mark.parametrize("case", [case for case in CASES if case != "buffers"])
def test_run_moves_to_mjax_and_back(written, case, tmp_path):
    run, out, again = tmp_path / "run", tmp_path / "out", tmp_path / "again"
    assert convert(written / case, run, "--optimizer") == 0
    bf16 = CASES[case].get("bf16", False)
    assert read_config(run / "config.json").precision.compute == ("bf16" if bf16 else "fp32")
    assert cli.main(["convert", "to-megatron", str(run), str(out), "--optimizer"]) == 0
    assert_same_tensors(out, written / case, bf16)
    following = written / f"{case}.next.npz"
    np.testing.assert_allclose(
        train_on(run, following), np.load(f"{following}.losses.npy"), atol=0.02 if bf16 else 1e-5
    )

    assert cli.main(["convert", "to-megatron", str(run), str(tmp_path / "later"), "--optimizer"]) == 0
    assert convert(tmp_path / "later", again, "--optimizer") == 0
    assert read_config(again / "config.json") == read_config(run / "config.json")
    ours, theirs = state_of(run), state_of(again)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(theirs[name], array, err_msg=name, strict=True)
    batches = draw_batches(tmp_path / "last.npz", 99)
    request = {"kind": case.split()[0], "batches": batches, "load": str(tmp_path / "later"), "bf16": bf16}
    (losses,) = train_megatron_core(tmp_path, request)
    np.testing.assert_allclose(losses, train_on(again, batches), atol=0.02 if bf16 else 1e-5)


def assert_same_tensors(out, written, bf16):
    """Compare every tensor of an export with those that megatron-core wrote."""
    for slot in ("", "exp_avg", "exp_avg_sq", *(["param"] if bf16 else [])):
        opened = [open_checkpoint(folder) for folder in (out, written)]
        ours, theirs = (folder.open_slot(slot) if slot else folder.tensors for folder in opened)
        named = {name: tensor[:] for name, tensor in ours.items()}
        for name in [name for name in named if name.endswith("_w")]:  # gate and up are apart
            named[name[:-2]] = np.concatenate([named.pop(name), named.pop(f"{name[:-2]}_v")])
        assert named.keys() == theirs.keys()
        for name, array in named.items():
            np.testing.assert_array_equal(array, theirs[name][:], err_msg=f"{slot} {name}", strict=True)


def test_buffers_of_ranks_are_refused(written, tmp_path, capsys):
    assert convert(written / "buffers", tmp_path / "run", "--optimizer") == 2
    assert "--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert convert(written / "buffers", tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "muon"}, "optimizer is 'muon', and mjax continues a run with 'adam'"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay is False"),
        ({"fp16": True}, "fp16 is True"),
        ({"lr_warmup_init": 0.1}, "lr_warmup_init is 0.1"),
        ({"lr_decay_style": "tanh"}, "no learning rate that decays as tanh"),
        ({"end_wd": 0.2}, "end_wd is 0.2"),
        ({"lr_warmup_steps": 9}, "lr_warmup_steps is 9 samples"),
        ({"consumed_train_samples": 24}, "5 steps of 4 are not its 24 samples"),
        ({"global_batch_size": None}, "no state of an optimizer after a step"),
        ({"optimizer state": None}, "no state of an optimizer after a step"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_optimizer_is_refused(written, change, words, tmp_path, capsys):
    file = written / "gpt torch" / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    for name, value in change.items():
        if name == "optimizer state":
            del content["optimizer"]
        elif name in content["opt_param_scheduler"]:
            content["opt_param_scheduler"][name] = value
        else:
            content["args"] = argparse.Namespace(**vars(content["args"]) | {name: value})
            for group in content["optimizer"]["param_groups"]:
                group |= {name: value} if name in group else {}
    (there := tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    torch.save(content, there / file.name)
    assert convert(tmp_path, tmp_path / "run", "--optimizer") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def recorded(tmp_path):
    """A Llama that megatron-core 0.19.2 trained for five steps, and its losses in the next five."""
    with tarfile.open(Path(__file__).with_name("megatron_recorded.tar.xz")) as archive:
        archive.extractall(tmp_path / "recorded", filter="data")
    return tmp_path / "recorded" / "0.19.2"


def test_recorded_optimizer_continues(recorded, tmp_path):
    run = tmp_path / "run"
    assert convert(recorded / "llama_optimizer", run, "--optimizer") == 0
    config, scalars = read_config(run / "config.json"), state_of(run)
    assert (config.optimizer.warmup_steps, config.optimizer.decay_steps, config.train.steps) == (2, 12, 14)
    assert (config.train.global_batch, config.train.seed, config.optimizer.beta2) == (4, 7, 0.95)
    assert [int(scalars[name]) for name in ("step", "samples", "optimizer.0.count")] == [5, 20, 5]
    losses = np.load(recorded / "llama_optimizer.npz.losses.npy")
    np.testing.assert_allclose(train_on(run, recorded / "llama_optimizer.npz"), losses, atol=1e-5)


def test_schedule_that_ends_with_the_run_is_extended_with_it(recorded, tmp_path):
    """An export and import keep decay_steps unset, so that the end of the run sets it."""
    run, out, again = tmp_path / "run", tmp_path / "out", tmp_path / "again"
    assert convert(recorded / "llama_optimizer", run, "--optimizer") == 0
    config = read_config(run / "config.json")
    config = replace(config, optimizer=replace(config.optimizer, decay_steps=None))
    save_config(config, run / "config.json")
    assert cli.main(["convert", "to-megatron", str(run), str(out), "--optimizer"]) == 0
    assert convert(out, again, "--optimizer") == 0
    assert read_config(again / "config.json").optimizer == config.optimizer


def test_longer_sequences_are_refused(recorded, tmp_path, capsys):
    assert convert(recorded / "llama_optimizer", tmp_path / "run", "--optimizer", "--rope", "yarn:8") == 2
    assert "--optimizer continues a run as it is" in capsys.readouterr().err


def test_command_continues_import(recorded, tmp_path):
    assert convert(recorded / "llama_optimizer", tmp_path / "run", "--optimizer") == 0
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = [sys.executable, "train.py", "--run", str(tmp_path / "run"), "--data.mock", "--train.steps", "7"]
    process = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "continued after step 5" in process.stdout
    assert int(state_of(tmp_path / "run")["samples"]) == 28


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, ("--format", "torch"), "--optimizer is for --format torch_dist"),
        ({"name": "muon"}, (), "was trained with muon in fp32"),
        ({}, (), "has taken no step, so it has no state of an optimizer"),
    ],
    ids=["format", "muon", "import"],
)
def test_impossible_export_is_refused(recorded, changes, flags, words, tmp_path, capsys):
    run = tmp_path / "run"
    assert convert(recorded / "llama_optimizer", run) == 0
    config = read_config(run / "config.json")
    save_config(replace(config, optimizer=replace(config.optimizer, **changes)), run / "config.json")
    assert cli.main(["convert", "to-megatron", str(run), str(tmp_path / "out"), "--optimizer", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
