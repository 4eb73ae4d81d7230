"""Files of Megatron's ranks without torch."""

import pytest

from mjax.interop.megatron import checkpoint


@pytest.fixture
def write_rank(monkeypatch):
    """A function that leaves a file of a rank, whose content torch would read."""
    held = {}
    monkeypatch.setattr(checkpoint, "load_megatron_file", held.__getitem__)
    monkeypatch.setattr(checkpoint, "to_numpy", lambda file, arrays: arrays)

    def write(folder, numbers, **content):
        file = folder / "release" / f"mp_rank_{numbers}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        held[file] = {"checkpoint_version": 3.0} | content

    return write
