"""Damaged checkpoints: each kind is named, and none gets through."""

import os
import random
import re

import pytest

from mjax.errors import RunError, UsageError
from tests.training.saved import abstract, data_file, mesh_of, save_all, save_large, state_on


def truncate(folder):
    file = data_file(folder)
    os.truncate(file, file.stat().st_size // 2)
    return r"model/.* has \d+ bytes of \d+"


def flip_a_bit(folder):
    file = data_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return r"model/.* is not what was written \(checksum\)"


def remove_a_file(folder):
    data_file(folder).unlink()
    return "model/.* is missing"


def remove_the_metadata(folder):
    (folder / "_CHECKPOINT_METADATA").unlink()
    return "_CHECKPOINT_METADATA is missing"


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json is missing, so it was not finished or not copied completely"


def rename_an_array_in_the_manifest(folder):
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"model":', '"modem":'))
    return "manifest.json is not what was written"


def cut_the_manifest(folder):
    os.truncate(folder / "manifest.json", 50)
    return "manifest.json is not what was written"


KINDS_OF_DAMAGE = [
    truncate,
    flip_a_bit,
    remove_a_file,
    remove_the_metadata,
    remove_the_manifest,
    rename_an_array_in_the_manifest,
    cut_the_manifest,
]


@pytest.mark.parametrize("damage", KINDS_OF_DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_used(checkpoints, notices, damage):
    target = save_large(checkpoints, 200, 300)
    words = damage(checkpoints.folder / "300")
    notices.clear()
    step, restored = checkpoints.restore(target)
    assert (step, int(restored["step"])) == (200, 200)
    [notice] = notices
    assert re.fullmatch(f"checkpoint 300 is damaged: {words}; using 200", notice)


def test_a_flipped_bit_in_any_file_is_noticed(checkpoints):
    target = save_all(checkpoints, 1)
    draw = random.Random(0)
    for file in sorted((checkpoints.folder / "1").rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        if content:
            at = draw.randrange(len(content))
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
            with pytest.raises(
                RunError, match=r"checkpoint 1 is damaged: .* is not what was written.*; there is no other"
            ):
                checkpoints.restore(target)
            file.write_bytes(content)
    assert checkpoints.restore(target)[0] == 1


def test_an_explicit_step_that_is_damaged_is_refused_with_what_else_there_is(checkpoints):
    target = save_large(checkpoints, 200, 300)
    flip_a_bit(checkpoints.folder / "300")
    with pytest.raises(RunError, match=r"checkpoint 300 is damaged: model/.*\(checksum\); there are also 200"):
        checkpoints.restore(target, step=300)
    assert checkpoints.restore(target, step=200)[0] == 200


def test_a_damaged_checkpoint_is_written_anew_when_the_run_gets_there_again(checkpoints):
    target = save_large(checkpoints, 200, 300)
    flip_a_bit(checkpoints.folder / "300")
    assert checkpoints.restore(target)[0] == 200
    save_large(checkpoints, 300)
    assert checkpoints.restore(target)[0] == 300


def test_a_damaged_checkpoint_does_not_push_out_a_sound_one(checkpoints):
    target = save_large(checkpoints, 200, 300)
    flip_a_bit(checkpoints.folder / "300")
    checkpoints.restore(target)
    save_large(checkpoints, 250)
    assert checkpoints.steps() == [200, 250]


def test_when_every_checkpoint_is_damaged_each_is_named(checkpoints):
    target = save_large(checkpoints, 200, 300)
    flip_a_bit(checkpoints.folder / "200")
    remove_the_manifest(checkpoints.folder / "300")
    words = r"300 is damaged: manifest.json is missing.*; checkpoint 200 is damaged: .*\(checksum\); there is no other"
    with pytest.raises(RunError, match=words):
        checkpoints.restore(target)


def test_no_checkpoint_is_a_usage_error_that_says_what_is_there(checkpoints):
    target = abstract(state_on(mesh_of(4, 2)))
    with pytest.raises(UsageError, match="has no checkpoint; give a run that has saved one"):
        checkpoints.restore(target)
    save_all(checkpoints, 10, 20)
    with pytest.raises(UsageError, match="has no checkpoint 30; there are 10, 20"):
        checkpoints.restore(target, step=30)
