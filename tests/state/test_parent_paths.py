"""Runs whose path contains `..`, through every command and from Python."""

import json
import os
from pathlib import Path

import pytest

import mjax
from mjax.checkpoint.folders import checkpoint_steps
from mjax.commands import cli
from mjax.utils.files import resolve_parents
from tests.test_chat import run  # noqa: F401
from tests.test_sft_command import FLAGS, MESH, base  # noqa: F401
from tests.tiny_config import config as TINY


def test_without_parents_follows_links_as_the_system_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/deep")
    for path in ("runs", "/a/b", "s3://bucket/../a", "."):
        assert resolve_parents(Path(path)) == Path(path)
    for path, expected in {
        "disk/../runs": "runs", "link/../runs/x": "disk/runs/x", "../runs": str(tmp_path.parent / "runs"),
        "link/..": "disk", "disk/..": str(tmp_path), "no/where/../x": "no/x",
    }.items():  # fmt: skip
        assert resolve_parents(Path(path)) == Path(expected), path
        assert os.path.realpath(resolve_parents(Path(path))) == os.path.realpath(path)


def test_trainer_takes_parents_in_its_paths(tmp_path, monkeypatch, fewer_devices):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert mjax.Trainer(TINY, "../runs/one", show=False).train().exit_code == 0
    assert checkpoint_steps(tmp_path / "runs" / "one") == [8, 12]
    assert mjax.open_run("../runs/one").step == 12


@pytest.mark.ci
def test_every_command_takes_parents_in_its_paths(base, tmp_path, monkeypatch, capsys):  # noqa: F811
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    new = ["--init", "../runs/base", "--data", "../chat.jsonl", "--runs", "../runs", "--name", "chat", *FLAGS, *MESH]
    commands = [
        ["sft", *new, "--lora.rank", "4", "--train.steps", "2"],
        ["train", "--run", "../runs/chat", *MESH, "--train.steps", "4", "--allow-change"],
        ["generate", "--run", "../runs/chat", "--prompt", "What", "--tokens", "4"],
        ["plan", "--run", "../runs/chat"],
        ["convert", "to-hf", "../runs/chat", "../merged", "--merged"],
        ["convert", "from-hf", "../merged", "../runs/back"],
        ["runs", "compare", "../runs/chat", "chat", "--runs", "../runs"],
        ["runs", "--runs", "../runs", "--json"],
        ["runs", "remove", "../runs/chat", "--yes"],
    ]
    codes = {" ".join(command[:3]): cli.main(command) for command in commands}
    said = capsys.readouterr()
    assert set(codes.values()) <= {0, 2}, said.err
    assert [name for name, code in codes.items() if code] == ["runs compare ../runs/chat"], said.err
    assert "needs two or more runs" in said.err  # both are the same one
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert not (tmp_path / "runs" / "chat").exists()
    assert [json.loads(line)["step"] for line in said.out.splitlines() if line.startswith("{")] == [0, 10, 4]
