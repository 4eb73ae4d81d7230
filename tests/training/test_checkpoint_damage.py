"""Damaged checkpoints: each kind is named, and none gets through."""

import os
import random
import re

import pytest

from mjax.errors import RunError, UsageError
from tests.training.saved import abstract, data_file, flip_a_bit, mesh_of, save_all, save_large, state_on


def truncate(folder):
    os.truncate(data_file(folder), data_file(folder).stat().st_size // 2)
    return r"model/.* has \d+ bytes of \d+"


def remove_a_file(folder):
    data_file(folder).unlink()
    return "model/.* is missing, so it was not finished or not copied completely"


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json is missing, so it was not finished or not copied completely"


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove_a_file, remove_the_manifest])
def test_damage_is_named_and_previous_checkpoint_used(checkpoints, notices, damage):
    whole = save_large(checkpoints, 200, 300)
    words = damage(checkpoints.folder / "300")
    for target, field in ((whole, None), (whole["model"], "model")):
        notices.clear()
        assert checkpoints.restore(target, field=field)[0] == 200
        [notice] = notices
        assert re.fullmatch(f"checkpoint 300 is damaged: {words}; using 200", notice)
    with pytest.raises(RunError, match=rf"checkpoint 300 is damaged: {words}; there are also 200"):
        checkpoints.restore(whole, step=300)


def test_flipped_bit_in_any_file_is_noticed(checkpoints):
    target = save_all(checkpoints, 1)
    draw = random.Random(0)
    for file in sorted((checkpoints.folder / "1").rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        if content:
            at = draw.randrange(len(content))
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
            words = r"checkpoint 1 is damaged: .* is not what was written.*; there is no other"
            with pytest.raises(RunError, match=words):
                checkpoints.restore(target)
            file.write_bytes(content)
    assert checkpoints.restore(target)[0] == 1


@pytest.mark.parametrize("step", [250, 300])
def test_damaged_checkpoint_is_set_aside_by_next_save(checkpoints, notices, step):
    target = save_large(checkpoints, 200, 300)
    flip_a_bit(checkpoints.folder / "300")
    damaged = data_file(checkpoints.folder / "300").read_bytes()
    assert checkpoints.restore(target)[0] == 200
    save_large(checkpoints, step)
    assert checkpoints.steps() == [200, step]
    assert checkpoints.restore(target)[0] == step
    assert data_file(checkpoints.folder / "300.damaged").read_bytes() == damaged
    assert f"renamed 300 to 300.damaged in {checkpoints.folder}; remove it when you do not need it" in notices


def test_missing_checkpoint_is_a_usage_error(checkpoints):
    with pytest.raises(UsageError, match="has no checkpoint; give a run that has saved one"):
        checkpoints.restore(abstract(state_on(mesh_of(4, 2))))
