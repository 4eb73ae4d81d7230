"""What may change between two starts of a run, and what is refused."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest

from mjax.config import BERTConfig, Config, DataConfig, load_config, save_config
from mjax.data.indexed import IndexedDatasetWriter
from mjax.errors import UsageError
from mjax.training import continuing
from mjax.training.continuing import FREE, changes_since, save_digests

CONFIG = Config(data=DataConfig(mock=True))
FIXED = {
    "model": (
        "kind", "layers", "hidden", "heads", "feed_forward", "sequence", "positions", "vocabulary",
        "vocabulary_multiple", "embedding_layernorm",
    ),
    "optimizer": ("name",),
}  # fmt: skip
LEARNED = continuing.LEARNED | {
    "model": ("activation", "window", "hidden_dropout", "attention_dropout", "layernorm_epsilon", "init_std"),
}


def _with(config=CONFIG, **sections):
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


@pytest.fixture
def run_of(tmp_path):
    """A run folder of a config, as one with checkpoints looks to a new start."""

    def make(config, step=10):
        folder = tmp_path / "run"
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "manifest.json").touch()
        save_config(config, folder / "config.json")
        save_digests(folder, config.data)
        return folder

    return make


def _write(prefix, seed, documents=20):
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, 257) as writer:
        for _ in range(documents):
            writer.add_document(random.integers(0, 257, 30))
    return str(prefix)


def test_every_field_of_the_config_is_in_exactly_one_class():
    fields = [(section.name, knob.name) for section in dataclasses.fields(Config) for knob in
              dataclasses.fields(getattr(CONFIG, section.name))]  # fmt: skip
    classes = [
        (section, knob) for table in (FIXED, LEARNED, FREE) for section, knobs in table.items() for knob in knobs
    ]
    assert sorted(classes) == sorted(fields), "give a new field a class in mjax/training/continuing.py"


def _fields(table):
    return [(section, knob) for section, knobs in table.items() for knob in knobs]


def _another(value, knob=""):
    """Another value of a field, of any type that one has."""
    if knob in ("batch_rampup", "batch_schedule"):
        return {"batch_rampup": (256, 256, 10_000), "batch_schedule": "0:256 1M:512"}[knob]
    if isinstance(value, bool):
        return not value
    if knob in ("schedule", "wsd_decay"):
        return "linear"
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return ("data/other",)
    return 7 if value is None else value + 1


@pytest.mark.parametrize(("section", "knob"), _fields(LEARNED))
def test_what_changes_the_learning_is_refused_and_allowed_on_demand(run_of, section, knob):
    whole = _with(  # every field of the schedule has had an effect at step 10
        train={"steps": 10}, optimizer={"schedule": "wsd", "warmup_steps": 3, "wsd_decay_steps": 4}
    )
    folder = run_of(whole)
    now = _with(whole, **{section: {knob: _another(getattr(getattr(whole, section), knob), knob)}})
    with pytest.raises(
        UsageError, match="--name NEW, and to continue this one with the change --allow-change"
    ) as error:
        changes_since(folder, now)
    assert f"{section}.{knob} " in str(error.value)
    assert changes_since(folder, now, allow=True)[0].startswith(f"changed {section}.{knob}: ")


@pytest.mark.parametrize(("section", "knob"), _fields(FREE))
def test_what_is_harmless_changes_with_a_line(run_of, section, knob):
    folder = run_of(CONFIG)
    now = _with(**{section: {knob: _another(getattr(getattr(CONFIG, section), knob), knob)}})
    assert changes_since(folder, now)[0].startswith(f"changed {section}.{knob}: ")


@pytest.mark.parametrize("knob", FIXED["model"])
def test_another_model_is_refused_whatever_is_allowed(run_of, knob):
    now = _with(model={knob: _another(getattr(CONFIG.model, knob))})
    with pytest.raises(UsageError, match=rf"another model \(model\.{knob} .* choose another --name"):
        changes_since(run_of(CONFIG), now, allow=True)


def test_another_optimizer_is_refused_whatever_is_allowed_because_of_its_moments(run_of):
    folder, now = run_of(CONFIG), _with(optimizer={"name": "muon"})
    words = rf"trained with adamw, .* type --optimizer\.name adamw to continue it, or --init {folder} --name NEW"
    with pytest.raises(UsageError, match=words):
        changes_since(folder, now, allow=True)


def test_a_run_named_by_its_folder_is_told_where_its_config_is(run_of):
    folder = run_of(CONFIG)
    with pytest.raises(UsageError, match=rf"type --config {folder}/config\.json --name NEW instead of --run"):
        changes_since(folder, _with(optimizer={"learning_rate": 1.0}), resumed=True)
    assert load_config(f"{folder}/config.json") == CONFIG


def test_a_run_without_steps_of_its_own_takes_any_setting_but_another_model(run_of):
    folder = run_of(CONFIG, step=0)  # as `mjax convert` writes it
    changed = _with(optimizer={"learning_rate": 1.0, "name": "muon"}, data={"mock": False, "path": ("data/corpus",)})
    assert "changed optimizer.learning_rate: 0.00015 → 1.0" in changes_since(folder, changed)
    with pytest.raises(UsageError, match="another model"):
        changes_since(folder, _with(model={"layers": 3}))


def test_a_longer_run_is_the_same_run_and_notes_say_what_follows_its_steps(run_of, tmp_path):
    data = DataConfig(path=(_write(tmp_path / "corpus", 0),))
    before = _with(data=dataclasses.asdict(data), train={"steps": 10, "global_batch": 8})
    folder = run_of(before)
    longer = _with(before, train={"steps": 20})
    changed, order, rate = changes_since(folder, longer)
    assert changed == "changed train.steps: 10 → 20"
    assert "--data.samples 80 keeps it" in order
    assert rate == (
        "note: the learning rate follows --train.steps: its decay ends at step 20 instead of 10; "
        "--optimizer.decay-steps 10 keeps it"
    )
    kept = _with(longer, optimizer={"decay_steps": 10}, data={"samples": 80})  # as both notes say
    assert changes_since(folder, kept) == [
        "changed data.samples: None → 80", "changed optimizer.decay_steps: None → 10", "changed train.steps: 10 → 20",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"optimizer\.decay_steps None, now 15"):
        changes_since(folder, _with(longer, optimizer={"decay_steps": 15}))


def test_a_value_that_is_written_out_is_no_change(run_of):
    config = replace(CONFIG, model=BERTConfig())
    same = _with(
        config, model={"mlm_activation": "gelu_tanh"}, optimizer={"decay_steps": 300_000, "wsd_decay_steps": 30_000}
    )
    assert len(changes_since(run_of(config), same)) == 3


def test_other_tokens_under_the_same_path_are_refused(run_of, tmp_path):
    prefix = _write(tmp_path / "corpus", 0)
    folder, config = (
        run_of(_with(data={"mock": False, "path": (prefix,)})),
        _with(data={"mock": False, "path": (prefix,)}),
    )
    assert changes_since(folder, config) == []
    _write(tmp_path / "corpus", 0)  # prepared again from the same text
    assert changes_since(folder, config) == []
    _write(tmp_path / "corpus", 1)  # of the same lengths: only the tokens tell
    with pytest.raises(UsageError, match=r"\(data\.path .*corpus, with other tokens than before\)"):
        changes_since(folder, config)
    assert changes_since(folder, config, allow=True) == []


def test_the_same_tokens_under_another_path_are_the_same_data(run_of, tmp_path):
    first = ("0.3", _write(tmp_path / "a", 0), "0.7", _write(tmp_path / "b", 1))
    folder = run_of(_with(data={"mock": False, "path": first}))
    moved = ("0.3", _write(tmp_path / "c", 0), "0.7", _write(tmp_path / "d", 1))
    assert changes_since(folder, _with(data={"mock": False, "path": moved}))[0].startswith("changed data.path: ")
    weights = ("0.4", moved[1], "0.6", moved[3])
    with pytest.raises(UsageError, match=r"data\.path .* now 0\.4"):
        changes_since(folder, _with(data={"mock": False, "path": weights}))


def test_a_folder_from_before_digests_is_compared_by_paths(run_of, tmp_path):
    config = _with(data={"mock": False, "path": (_write(tmp_path / "a", 0),)})
    folder = run_of(config)
    (folder / continuing.DIGESTS).unlink()
    assert changes_since(folder, config) == []
    with pytest.raises(UsageError, match=r"data\.path"):
        changes_since(folder, _with(config, data={"path": (_write(tmp_path / "b", 0),)}))


@pytest.mark.parametrize("text", ["{", "[]", "\0"])
def test_digests_that_are_damaged_are_named(run_of, text):
    folder = run_of(CONFIG)
    (folder / continuing.DIGESTS).write_text(text)
    with pytest.raises(UsageError, match=r"data\.json is damaged; remove it"):
        changes_since(folder, CONFIG)


def test_a_digest_is_of_the_tokens_all_over_a_file(tmp_path):
    from mjax.data.indexed import SAMPLED, SAMPLED_TOKENS, IndexedDataset

    prefix = _write(tmp_path / "large", 0, documents=SAMPLED * SAMPLED_TOKENS // 30 + 5000)
    before = IndexedDataset(prefix).digest
    with open(f"{prefix}.bin", "r+b") as file:
        file.write(b"\1\0\1\0")
    assert IndexedDataset(prefix).digest != before
    assert json.dumps(before)


# --- Schedules --------------------------------------------------------------------------------------------------------

STABLE = _with(train={"steps": 100}, optimizer={"schedule": "wsd", "warmup_steps": 5, "wsd_decay_steps": 20})


@pytest.mark.parametrize(
    "optimizer",
    [
        {"wsd_decay_steps": 40},
        {"wsd_decay": "minus_sqrt", "min_learning_rate": 0.0},
        {"schedule": "constant", "wsd_decay_steps": None},
    ],
)
def test_a_schedule_may_change_where_no_step_has_used_it(optimizer, run_of):
    folder = run_of(STABLE, step=60)
    assert changes_since(folder, _with(STABLE, train={"steps": 120}, optimizer=optimizer))
    with pytest.raises(UsageError, match=r"optimizer.wsd_decay_steps 20, now 42"):
        changes_since(folder, _with(STABLE, optimizer={"wsd_decay_steps": 42}))
    with pytest.raises(UsageError, match=r"optimizer.learning_rate 0.00015, now 0.1"):
        changes_since(folder, _with(STABLE, optimizer={"learning_rate": 0.1}))


def test_a_decay_from_an_earlier_checkpoint_may_have_another_form(run_of):
    folder = run_of(STABLE, step=60)
    (folder / "checkpoints" / "100").mkdir()
    (folder / "checkpoints" / "100" / "manifest.json").touch()
    branch = _with(STABLE, train={"steps": 70}, optimizer={"wsd_decay_steps": 10})
    with pytest.raises(UsageError, match="wsd_decay_steps 20, now 10"):
        changes_since(folder, branch)
    notes = changes_since(folder, branch, step=60)
    assert "changed optimizer.wsd_decay_steps: 20 → 10" in notes
    assert not any("rises" in note for note in notes)


def test_a_run_that_goes_on_after_its_decay_is_told_where_to_go_on_from_instead(run_of):
    folder = run_of(STABLE, step=60)
    (folder / "checkpoints" / "100").mkdir()
    (folder / "checkpoints" / "100" / "manifest.json").touch()
    longer = _with(STABLE, train={"steps": 200})
    assert (
        "note: the learning rate had decayed since step 80 and rises again after checkpoint 100; "
        "--step 60 continues from before it"
    ) in changes_since(folder, longer)
    assert not any("rises" in note for note in changes_since(folder, longer, step=60))
