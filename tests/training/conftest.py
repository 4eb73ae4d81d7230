"""An open folder of checkpoints and what it said; and watchdogs that do not wait."""

import pytest

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.cluster import watchdog


@pytest.fixture
def notices():
    return []


@pytest.fixture
def checkpoints(tmp_path, notices):
    with Checkpoints(tmp_path / "checkpoints", on_notice=notices.append) as opened:
        yield opened


@pytest.fixture
def fast_watchdogs(monkeypatch):
    for name, seconds in {
        "HEARTBEAT_INTERVAL": 0.02,
        "FAILURE_GRACE": 0.5,
        "SUSPECT_TIMEOUT": 0.2,
        "SHUTDOWN_TIMEOUT": 0.5,
    }.items():
        monkeypatch.setattr(watchdog, name, seconds)
