"""The fault campaign notices what it looks for."""

import json

from mjax.checkpoint.folders import write_manifest
from tests.faults import runs
from tests.faults.runs import STEPS, Ended, Outcome, Place


def test_fault_campaign_sees_hangs_and_tracebacks():
    fine, hangs, fails = Outcome(""), Outcome(""), Outcome("")
    Ended(0, "all is well").judge(fine, 0)
    Ended(None, "step 5").judge(hangs, 0)
    Ended(0, "Traceback (most recent call last):\nValueError: x").judge(fails, 0)
    assert [outcome.sound for outcome in (fine, hangs, fails)] == [True, False, False]
    assert (hangs.hang, fails.traceback) == (True, True)


def test_fault_campaign_sees_other_losses_and_weights(tmp_path, monkeypatch):
    place = Place(tmp_path, tmp_path, 0.0, {STEPS: (1.5, None)}, {STEPS: {"weight": b"1"}})
    checkpoint = tmp_path / "run" / "checkpoints" / str(STEPS)
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, STEPS, {})
    for loss, weight, words in ((1.5, b"1", ""), (1.5000001, b"1", "other losses; "), (1.5, b"2", "other weights; ")):
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": STEPS, "loss": loss}) + "\n")
        monkeypatch.setattr(runs, "arrays_of", lambda *_, weight=weight: {"weight": weight})
        outcome = Outcome("killed")
        place.compare("run", outcome)
        assert (outcome.silent, outcome.words) == (bool(words), words)
