"""`mjax check-scaling`: right parametrizations pass, and of each planted mistake the weight is named."""

import json

import optax
import pytest

from mjax.commands import check_scaling, cli
from mjax.config import Config, GPTConfig, LlamaConfig, MixtureConfig, OptimizerConfig, TrainConfig
from mjax.config.run import write_config
from mjax.parallel.weights import CLASS, COLUMNS, IN, OUT, ROWS, TOKEN
from mjax.step import parametrization

SIZES = {"layers": 4, "hidden": 64, "heads": 2, "sequence": 16, "vocabulary": 60}
MODELS = {
    "gpt": GPTConfig(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "mixture": MixtureConfig(**SIZES),
}
COMPLETEP = {"parametrization": "completep", "base_width": 64, "base_depth": 4}
MUP = {"parametrization": "mup", "base_width": 64}
HEADS = {**MUP, "base_head_size": 32}


def config_of(kind, optimizer):
    return Config(model=MODELS[kind], optimizer=OptimizerConfig(**optimizer), train=TrainConfig(steps=10))


def failures_of(config):
    growths = check_scaling.measure(config, widths=(64, 256), depths=(4, 16), steps=5)
    return {(growth.measure, growth.part) for growth in growths if growth.fails}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("gpt", COMPLETEP), ("llama", HEADS), ("llama", {**MUP, "base_width": 1024, "name": "muon"}), ("mixture", MUP)],
)
def test_right_parametrization_passes(kind, optimizer):
    assert not failures_of(config_of(kind, optimizer))


def is_hidden(dims):
    return bool({IN, ROWS} & {*dims}) and bool({OUT, COLUMNS} & {*dims})


# By name: model, optimizer, one of the failures, and the wrong scale from the right one, the ratios and the card.
MISTAKES = {
    "no 1 / d": ("llama", HEADS, ("updates", "blocks.attention.qkv.kernel (q)"), lambda right, m, depth, dims, card: (
        right._replace(multiplier=1.0, initial=right.initial / right.multiplier, rate=right.rate / right.multiplier)
        if "q" in (card[3] or ()) else right
    )),
    "output's initial values": ("llama", MUP, ("size", "logits"), lambda right, m, depth, dims, card: (
        right._replace(initial=1.0) if card[0] else right
    )),
    "output's rate": ("llama", MUP, ("updates", "head.table"), lambda right, m, depth, dims, card: (
        right._replace(rate=1.0) if card[0] else right
    )),
    "hidden rate": ("llama", MUP, ("updates", "blocks.mlp.down.kernel"), lambda right, m, depth, dims, card: (
        right._replace(rate=right.rate * m) if is_hidden(dims) else right
    )),
    "hidden initial values": ("llama", MUP, ("start", "blocks.mlp.down.kernel"), lambda right, m, depth, dims, card: (
        right._replace(initial=right.initial * m**0.5) if is_hidden(dims) else right
    )),
    "embedding's rate": ("llama", MUP, ("updates", "embedding.table"), lambda right, m, depth, dims, card: (
        right._replace(rate=right.rate / m) if TOKEN in dims and not card[0] else right
    )),
    "router": ("mixture", MUP, ("updates", "blocks.mlp.router.kernel"), lambda right, m, depth, dims, card: (
        right._replace(initial=1.0, rate=1.0) if CLASS in dims else right
    )),
    "residual stream": ("llama", COMPLETEP, ("start", "blocks.mlp.down.kernel"), lambda right, m, depth, dims, card: (
        right._replace(initial=right.initial * depth, rate=right.rate * depth) if card[2] else right
    )),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistake_is_named(name, monkeypatch):
    kind, optimizer, failure, wrong = MISTAKES[name]
    right = parametrization._weight_scale

    def planted(config, dims, *card):
        width = config.model.hidden / config.optimizer.base_width
        depth = config.model.layers / (config.optimizer.base_depth or 4)
        return wrong(right(config, dims, *card), width, depth, dims, card)

    monkeypatch.setattr(parametrization, "_weight_scale", planted)
    assert failure in failures_of(config_of(kind, optimizer))


@pytest.mark.ci
def test_matrices_may_start_at_zero(monkeypatch):
    """Output layers do in arXiv 2203.03466, appendix D.2; the share that a decay takes of them is unknown."""
    right = parametrization._weight_scale

    def planted(config, dims, is_output, by_muon, residual, parts):
        scale = right(config, dims, is_output, by_muon, residual, parts)
        return scale._replace(initial=0.0) if residual else scale

    monkeypatch.setattr(parametrization, "_weight_scale", planted)
    growths = check_scaling.measure(config_of("llama", MUP), widths=(64, 128), depths=(4, 8), steps=1)
    assert not any(growth.fails for growth in growths if growth.measure in ("start", "decay"))


@pytest.mark.ci
def test_decay_that_is_not_scaled_is_named(monkeypatch):
    """Multiply the decay by the factor of the rate too, as `optax.adamw` with that rate does."""

    def with_rate(config, transform):
        def update(gradients, state, model):
            updates, state = transform.update(gradients, state, model)
            return parametrization._multiply(config, model, updates, lambda scale: scale.rate), state

        return optax.GradientTransformation(transform.init, update)

    monkeypatch.setattr(check_scaling, "scale_updates", with_rate)
    failures = failures_of(config_of("llama", MUP))
    assert {part for measure, part in failures if measure == "decay"} > {"blocks.mlp.down.kernel", "head.table"}


@pytest.mark.ci
def test_command_names_the_parts_of_a_standard_model(tmp_path, capsys):
    file, picture = tmp_path / "small.py", tmp_path / "scaling.png"
    write_config(config_of("gpt", {"parametrization": "standard"}), file, "A small model.")
    words = ["check-scaling", "--config", str(file), "--widths", "64", "256"]
    assert cli.main([*words, "--figure", str(picture)]) == 1
    printed = capsys.readouterr().out
    assert "✗ blocks.mlp.down.kernel: the effect of its updates on the logits grows as width^" in printed
    assert picture.stat().st_size > 10_000
    assert cli.main([*words, "--json", "--steps", "1"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--config bert_demo", "mjax check-scaling is not for a BERT; give the config of a causal model"),
        ("--config gpt_demo --widths 64", "--widths 64 shows no growth; give two sizes, such as --widths 8 64"),
        ("--config gpt_demo --figure nowhere/a.png", "--figure nowhere/a.png: there is no folder nowhere"),
        ("--config gpt_demo --depths 0 4", "--depths 0 4 shows no growth; give two sizes, such as --depths 8 64"),
    ],
)
def test_bad_flag_gets_a_sentence(flags, sentence, capsys):
    assert cli.main(["check-scaling", *flags.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_resized_model_keeps_its_proportions():
    model = LlamaConfig(hidden=4096, heads=32, kv_heads=8, feed_forward=14336).resize(512, 3)
    assert (model.hidden, model.heads, model.groups, model.mlp_width, model.layers) == (512, 4, 1, 1792, 3)
    model = model.resize(1024, 3, more_heads=False)
    assert (model.heads, model.groups, model.head_size) == (4, 1, 256)
