"""An open folder of checkpoints, and what it said."""

import pytest

from mjax.training.checkpoint import Checkpoints


@pytest.fixture
def notices():
    return []


@pytest.fixture
def checkpoints(tmp_path, notices):
    with Checkpoints(tmp_path / "checkpoints", on_notice=notices.append) as opened:
        yield opened
