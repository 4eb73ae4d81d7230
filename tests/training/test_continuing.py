"""Allowed and rejected changes between two starts of a run."""

import contextlib
import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from mjax.config import BERTConfig, Config, DataConfig, save_config
from mjax.data.indexed import DIGEST_SPAN_TOKENS, DIGEST_SPANS, IndexedDataset, IndexedDatasetWriter
from mjax.errors import UsageError
from mjax.run import continuing
from mjax.run.continuing import changes_since, save_digests

CONFIG = Config(data=DataConfig(mock=True))


def _with(config=CONFIG, **sections):
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def add_checkpoint(folder, step):
    (folder / "checkpoints" / str(step)).mkdir(parents=True)
    (folder / "checkpoints" / str(step) / "manifest.json").touch()


@pytest.fixture
def run_of(tmp_path):
    """A run folder of a config, as one with checkpoints looks to a new start."""

    def make(config, step=10):
        add_checkpoint(tmp_path / "run", step)
        save_config(config, tmp_path / "run" / "config.json")
        save_digests(tmp_path / "run", config.data)
        return tmp_path / "run"

    return make


def write(prefix, seed, documents=20):
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, 257) as writer:
        for _ in range(documents):
            writer.add_document(random.integers(0, 257, 30))
    return str(prefix)


# --- Fields -----------------------------------------------------------------------------------------------------------


FREE = {  # written out, so that a field that becomes free is a change here
    "model": {"attention"},
    "mesh": {
        "pipe", "data", "replicate", "model", "expert", "context", "context_attention", "sequence_parallel", "schedule",
        "virtual_stages", "stage_layers", "zero",
    },
    "data": {"cache"},
    "train": {"steps", "tokens", "micro_batch", "recompute", "unroll", "loss_chunks", "eval_interval", "eval_batches"},
    "checkpoint": {"interval", "keep_last", "keep_every"},
    "health": {"spike"},
    "log": {"interval", "tensorboard", "wandb", "trackio", "prompt", "sample_prompts", "sample_tokens", "scaling"},
}  # fmt: skip
TUNED = {"activation", "window", "hidden_dropout", "attention_dropout", "layernorm_epsilon", "init_std", "lora_dropout"}
SPECIAL = {"batch_rampup": (256, 256, 10_000), "stage_layers": (2, 2), "schedule": "linear", "wsd_decay": "minus_sqrt"}


def another(knob, value):
    """Another value of a field, of any type that one has."""
    if knob in SPECIAL:
        return SPECIAL[knob]
    if isinstance(value, tuple):
        return ("data/other",)
    return not value if isinstance(value, bool) else 7 if value is None else value + type(value)(1)


def test_every_field_is_free_learned_or_fixed(run_of):
    whole = _with(  # every field of the schedule has had an effect at step 10
        train={"steps": 10}, optimizer={"schedule": "wsd", "warmup_steps": 3, "wsd_decay_steps": 4}
    )
    folder = run_of(whole)
    for section, values in vars(whole).items():
        for knob, value in vars(values).items():
            if knob == "batch_history":  # which no user sets
                continue
            now = _with(whole, **{section: {knob: another(knob, value)}})
            if knob in FREE.get(section, ()):
                changed = changes_since(folder, now)
            elif knob in TUNED or (section != "model" and (section, knob) != ("optimizer", "name")):
                way = "--name NEW, and to continue this one with the change --allow-change"
                with pytest.raises(UsageError, match=rf"{section}\.{knob} .*{way}"):
                    changes_since(folder, now)
                changed = changes_since(folder, now, allow=True)
            else:
                words = rf"another model \(model\.{knob} .* choose another --name|{knob} adamw to continue it"
                with pytest.raises(UsageError, match=words):
                    changes_since(folder, now, allow=True)
                continue
            assert changed[0].startswith(f"changed {section}.{knob}: ")


def test_resumed_run_is_told_its_config_file(run_of):
    folder = run_of(CONFIG)
    with pytest.raises(UsageError, match=rf"type --config {folder}/config\.json --name NEW instead of --run"):
        changes_since(folder, _with(optimizer={"learning_rate": 1.0}), resumed=True)


def test_run_without_steps_takes_any_setting(run_of):
    folder = run_of(CONFIG, step=0)  # as `mjax convert` writes it
    changed = _with(optimizer={"learning_rate": 1.0, "name": "muon"}, data={"mock": False, "path": ("data/corpus",)})
    assert "changed optimizer.learning_rate: 0.00015 → 1.0" in changes_since(folder, changed)
    with pytest.raises(UsageError, match="another model"):
        changes_since(folder, _with(model={"layers": 3}))


def test_values_written_out_change_nothing(run_of):
    config = replace(CONFIG, model=BERTConfig())
    optimizer = {"decay_steps": 300_000, "wsd_decay_steps": 30_000}
    same = _with(config, model={"mlm_activation": "gelu_tanh"}, optimizer=optimizer)
    assert len(changes_since(run_of(config), same)) == 3


def test_longer_run_is_told_what_follows_its_steps(run_of, tmp_path):
    data = DataConfig(path=(write(tmp_path / "corpus", 0),))
    before = _with(data=dataclasses.asdict(data), train={"steps": 10, "global_batch": 8})
    folder, longer = run_of(before), _with(before, train={"steps": 20})
    changed, order, rate = changes_since(folder, longer)
    assert changed == "changed train.steps: 10 → 20"
    assert "--data.train-samples 80 keeps it" in order
    assert "its decay ends at step 20 instead of 10; --optimizer.decay-steps 10 keeps it" in rate
    kept = _with(longer, optimizer={"decay_steps": 10}, data={"train_samples": 80})  # as both notes say
    assert [line.partition(":")[0] for line in changes_since(folder, kept)] == [
        "changed data.train_samples", "changed optimizer.decay_steps", "changed train.steps",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"optimizer\.decay_steps None, now 15"):
        changes_since(folder, _with(longer, optimizer={"decay_steps": 15}))


def test_more_epochs_of_conversations_continue_run(run_of, tmp_path):
    data = {"path": (write(tmp_path / "chats", 0),), "conversations": True}
    before = _with(data=data | {"train_samples": 30}, train={"steps": 10, "global_batch": 4})
    longer = _with(before, data={"train_samples": 60}, train={"steps": 15})
    said = "\n".join(changes_since(run_of(before), longer))
    assert "changed data.train_samples: 30 → 60" in said
    assert "sample order" not in said


# --- Data -------------------------------------------------------------------------------------------------------------


def on(*path):
    return _with(data={"mock": False, "path": path})


def test_other_tokens_under_same_path_are_refused(run_of, tmp_path):
    prefix = write(tmp_path / "corpus", 0)
    folder, config = run_of(on(prefix)), on(prefix)
    write(tmp_path / "corpus", 0)  # prepared again from the same text
    assert changes_since(folder, config) == []
    write(tmp_path / "corpus", 1)  # of the same lengths: only the tokens tell
    with pytest.raises(UsageError, match=r"\(data\.path .*corpus, with other tokens than before\)"):
        changes_since(folder, config)
    assert changes_since(folder, config, allow=True) == []


def test_same_tokens_under_another_path_are_same_data(run_of, tmp_path):
    folder = run_of(on("0.3", write(tmp_path / "a", 0), "0.7", write(tmp_path / "b", 1)))
    moved = write(tmp_path / "c", 0), write(tmp_path / "d", 1)
    assert changes_since(folder, on("0.3", moved[0], "0.7", moved[1]))[0].startswith("changed data.path: ")
    with pytest.raises(UsageError, match=r"data\.path .* now 0\.4"):
        changes_since(folder, on("0.4", moved[0], "0.6", moved[1]))


def test_digests_may_be_missing_but_not_damaged(run_of, tmp_path):
    config = on(write(tmp_path / "a", 0))
    folder = run_of(config)
    (folder / continuing.DIGESTS).unlink()  # as an older version left the folder: paths are compared
    assert changes_since(folder, config) == []
    with pytest.raises(UsageError, match=r"data\.path"):
        changes_since(folder, on(write(tmp_path / "b", 0)))
    (folder / continuing.DIGESTS).write_text("[]")
    with pytest.raises(UsageError, match=r"data\.json: the content is \[\], which is not .*; remove it"):
        changes_since(folder, config)


def test_digest_is_of_tokens_all_over_a_file(tmp_path):
    prefix = write(tmp_path / "large", 0, documents=DIGEST_SPANS * DIGEST_SPAN_TOKENS // 30 + 5000)
    before = IndexedDataset(prefix).digest
    with open(f"{prefix}.bin", "r+b") as file:
        file.write(b"\1\0\1\0")
    assert IndexedDataset(prefix).digest != before


# --- Schedules --------------------------------------------------------------------------------------------------------

STABLE = _with(train={"steps": 100}, optimizer={"schedule": "wsd", "warmup_steps": 5, "wsd_decay_steps": 20})


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [
        ({"wsd_decay_steps": 40}, None),
        ({"wsd_decay": "minus_sqrt", "min_learning_rate": 0.0}, None),
        ({"schedule": "constant", "wsd_decay_steps": None}, None),
        ({"wsd_decay_steps": 42}, "optimizer.wsd_decay_steps 20, now 42"),  # the rate of step 60 had another value
        ({"learning_rate": 0.1}, "optimizer.learning_rate 0.00015, now 0.1"),
    ],
)
def test_schedule_may_change_where_no_step_used_it(optimizer, refused, run_of):
    folder, now = run_of(STABLE, step=60), _with(STABLE, optimizer=optimizer)
    with pytest.raises(UsageError, match=refused) if refused else contextlib.nullcontext():
        assert changes_since(folder, now)


def test_run_continues_from_before_its_decay(run_of):
    folder = run_of(STABLE, step=60)
    add_checkpoint(folder, 100)
    branch = _with(STABLE, train={"steps": 70}, optimizer={"wsd_decay_steps": 10})
    with pytest.raises(UsageError, match="wsd_decay_steps 20, now 10"):
        changes_since(folder, branch)
    longer = _with(STABLE, train={"steps": 200})
    note = "note: the learning rate had decayed since step 80 and rises again after checkpoint 100; "
    assert f"{note}--step 60 continues from before it" in changes_since(folder, longer)
    for config in (branch, longer):
        assert not any("rises" in line for line in changes_since(folder, config, step=60))
