"""Perplexity by position and the needle in a haystack: windows, metrics, and a model that finds what it has read."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from mjax import cli
from mjax.commands.evaluate import EvaluateArguments, evaluate, metrics_of
from mjax.config import LlamaConfig, MeshConfig, save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import RunError, UsageError
from mjax.models.build import build_model
from mjax.state.checkpoint import Checkpoints
from mjax.tasks.interface import Score
from mjax.tasks.needle import CITIES, Needle, NeedleOptions
from mjax.tasks.positions import Positions, PositionsOptions, bin_edges, mean_and_error
from tests.data.vocabularies import hf_byte_pairs
from tests.small import QUICKLY, small_config
from tests.tasks.lookup_model import LookupConfig, planted

BYTES = ByteTokenizer()
SEQUENCE = 256
STORY = "It was a long road. They walked on, and the sky grew dark over the hills! Who would have thought so? "


def written(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of a model that looks up, of one that looks 120 tokens back, and of one that never finds; and texts."""
    folder = tmp_path_factory.mktemp("long")
    kinds = {"far": {}, "near": {"reach": 120}, "never": {"latest": 200}}
    for name, changes in kinds.items():
        config = small_config(vocabulary=257, sequence=SEQUENCE, attention="auto", micro_batch=4, layers=2)
        model = LookupConfig(
            **{"layers": 2, "hidden": 64, "heads": 8, "sequence": SEQUENCE, "vocabulary": 257, "init_std": 1.0},
            **{"vocabulary_multiple": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0, **changes},
        )
        config = replace(config, model=model)
        weights = planted(jax.jit(partial(build_model, 5, model), compiler_options=QUICKLY)())
        with Checkpoints(folder / name / "checkpoints", on_notice=lambda line: None) as checkpoints:
            checkpoints.save(10, {"model": weights, "step": jnp.int32(10)})
        save_config(config, folder / name / "config.json")
        BYTES.save(folder / name / "tokenizer")
    random = np.random.default_rng(0)
    spoken = ["".join(random.choice(list("abcdefgh"), 60)) * 6 for _ in range(3)]  # each says the same again and again
    written(folder / "repeated.jsonl", *spoken, "short")
    written(folder / "story.jsonl", *[STORY * 3] * 8)
    return folder


def argv(folder, run, task, data, *flags):
    return ["--run", str(folder / run), "--task", task, "--data", str(folder / data), *map(str, flags)]


def found_by(folder, run, task, data, **options):
    return metrics_of(folder / run, task, folder / data, **options)


# --- Perplexity by position -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "bins", "spacing"), [(1024, 16, "log"), (7, 16, "log"), (100, 7, "equal")])
def test_bins_hold_every_position_once_and_no_bin_is_empty(length, bins, spacing):
    edges = bin_edges(length, bins, spacing)
    assert (edges[0], edges[-1]) == (1, length + 1)
    widths = np.diff(edges)
    assert (widths > 0).all()
    assert len(widths) <= bins
    if spacing == "equal":
        assert widths.max() - widths.min() <= 1
    else:
        assert widths[-1] == widths.max()


def test_documents_are_cut_into_stretches_of_all_positions_and_short_ones_are_counted(tmp_path):
    data = written(tmp_path / "texts.jsonl", "abcdefghij", "klmno", "pqrs", "")
    task = Positions(str(data), BYTES, LlamaConfig(sequence=5), PositionsOptions(bins=2))
    texts = [(window.tokens.tolist(), window.counted) for window in task.passes[0]]
    assert texts == [([256, *b"abcde"], 5), ([*b"efghij"], 5), ([256, *b"klmno"], 5)]
    losses = np.arange(15, dtype=np.float32).reshape(3, 5)
    values = {metric.name: metric.value for metric in task.metrics([losses])}
    remarks = {metric.name: metric.remark for metric in task.metrics([losses])}
    assert (values["documents"], values["stretches"], values["tokens"]) == (2, 3, 15)
    assert remarks["documents"] == "of 3; those with fewer than 5 tokens are left out"
    assert remarks["tokens"].startswith("and 4 left out")


def test_a_bin_is_the_mean_of_its_labels_with_the_standard_error_over_stretches(tmp_path):
    data = written(tmp_path / "texts.jsonl", "x" * 8 * 50)
    task = Positions(str(data), BYTES, LlamaConfig(sequence=8), PositionsOptions(bins=2, spacing="equal"))
    random = np.random.default_rng(0)
    of_stretch, of_label = random.normal(0, 1, (50, 1)), random.normal(0, 0.1, (50, 8))
    losses = np.float32(3 - 0.1 * np.arange(8) + of_stretch + of_label)
    first, last = task.bins(losses)
    assert (first["first"], first["last"], last["first"], last["last"]) == (1, 4, 5, 8)
    assert last["loss"] == pytest.approx(losses[:, 4:].mean(), rel=1e-6)
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-6)
    assert (first["tokens"], last["tokens"]) == (200, 200)
    # What stretches have in common does not average out over their labels; 1 / √200 would be half of it.
    assert last["standard_error"] == pytest.approx(1 / 50**0.5, rel=0.25)
    values = {metric.name: metric.value for metric in task.metrics([losses])}
    assert values["gain"] == pytest.approx(0.4, abs=0.05)
    assert values["gain_error"] < 0.02, "paired: what a stretch adds to both halves cancels"
    assert mean_and_error(np.array([2.0])) == (2.0, None)
    with pytest.raises(RunError, match=r"is not finite; try --precision\.compute fp32"):
        task.bins(losses * np.float32("nan"))


def test_a_scaled_model_is_compared_before_and_after_the_positions_of_its_training(tmp_path):
    data = written(tmp_path / "texts.jsonl", "x" * 64)
    model = LlamaConfig(sequence=64, rope_scaling="yarn", rope_factor=8.0, rope_original=8)
    linear = replace(model, rope_scaling="linear", rope_original=None)
    losses = np.where(np.arange(64) < 8, 1.0, 3.0)[None].astype(np.float32)
    for scaled in (model, linear):
        task = Positions(str(data), BYTES, scaled, PositionsOptions())
        values = {metric.name: metric.value for metric in task.metrics([losses])}
        assert (values["loss_before"], values["loss_after"], values["gain"]) == (1.0, 3.0, -2.0)
        assert values["gain_error"] is None


@pytest.mark.ci
def test_a_model_that_uses_its_context_gets_better_with_position(folder):
    """The text says the same again after 60 tokens: who looks further back than that knows what comes then."""
    far, never = (found_by(folder, run, "positions", "repeated.jsonl") for run in ("far", "never"))
    assert far["documents"] == 3
    early, late = (
        [row["loss"] for row in far["bins"] if test(row)]
        for test in (lambda row: row["last"] <= 60, lambda row: row["first"] > 70)
    )
    assert len(early) > 5
    assert len(late) == 3
    assert max(late) < 1e-3 < 5 < min(early)
    assert far["gain"] > 3
    assert abs(never["gain"]) < 0.5


# --- The needle -------------------------------------------------------------------------------------------------------


def needle(folder, tokenizer=BYTES, sequence=SEQUENCE, **options):
    return Needle(str(folder / "story.jsonl"), tokenizer, LlamaConfig(sequence=sequence), NeedleOptions(**options))


def test_texts_have_exactly_their_length_and_the_fact_at_its_depth(folder):
    task = needle(folder, sequence=1024, lengths=(1000, 300), depths=5, samples=3)
    assert task.lengths == (300, 1000)
    assert len(task.passes) == 10
    for (depth, length), windows in zip(task._cells(), task.passes, strict=True):
        for window in windows:
            assert len(window.tokens) == length
            assert window.tokens[0] == BYTES.eod
            text = bytes(window.tokens[1:].tolist()).decode()
            answer = text[-window.counted :]
            (city,) = [city for city in CITIES if text.count(city) == 3]
            fact = f" The magic number of {city} is{answer} and no other."
            question = f" What is the magic number of {city}? The magic number of {city} is{answer}"
            assert 1000 <= int(answer) < 10_000
            assert text.endswith(question)
            assert text.count(fact) == 1
            filler = text.removesuffix(question).replace(fact, "")
            assert filler in STORY * 24
            place = text.index(fact)
            assert -1 / 8 <= place / len(filler) - depth <= 0.5 / len(filler)
            assert depth in (0, 1) or text[place - 1] in ".!?" or len(filler) < 200


def test_depths_of_a_length_differ_in_depth_only_and_the_seed_draws_everything_else(folder):
    def texts(**options):
        task = needle(folder, lengths=(256,), depths=3, samples=4, **options)
        return [[window.tokens.tolist() for window in windows] for windows in task.passes]

    first, middle, last = texts()
    assert texts() == [first, middle, last]
    assert texts(seed=7) != [first, middle, last]
    assert first != middle
    for one, other in zip(first, last, strict=True):
        assert sorted(one) == sorted(other)
    assert len({tuple(text) for text in first}) == 4


def test_the_answer_is_what_follows_the_tokens_of_the_question_alone(folder, tmp_path):
    from mjax.data.tokenizers import load_tokenizer

    hf_byte_pairs().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(f"hf:{tmp_path / 'tokenizer.json'}")
    for windows in needle(folder, tokenizer, 1024, lengths=(512,), depths=2).passes:
        for window in windows:
            assert tokenizer.decode(window.tokens[-window.counted :].tolist()).strip().isdigit()


def test_of_a_large_file_no_more_is_read_than_filler_needs(tmp_path):
    encoded = []

    class Counting(ByteTokenizer):
        def encode(self, text):
            encoded.append(len(text))
            return super().encode(text)

    data = written(tmp_path / "large.jsonl", *["All work and no play. " * 500] * 10)
    Needle(str(data), Counting(), LlamaConfig(sequence=256), NeedleOptions(samples=1, depths=2))
    texts = [size for size in encoded if size > 1000]
    assert sum(texts[:-1]) < 100 * 256 <= sum(texts)
    assert len(texts) == 3


def test_lengths_are_halvings_of_the_sequence_with_room_for_the_texts(folder):
    assert needle(folder, sequence=2048).lengths == (256, 512, 1024, 2048)
    assert needle(folder, sequence=600).lengths == (300, 600)


def test_a_model_that_looks_up_finds_every_number_and_one_that_does_not_finds_none(folder):
    options = {"needle": NeedleOptions(lengths=(192, 256), depths=3, samples=4)}
    far, never = (found_by(folder, run, "needle", "story.jsonl", **options) for run in ("far", "never"))
    assert (far["found"], never["found"]) == (1, 0)
    assert [(cell["depth"], cell["length"], cell["found"], cell["samples"]) for cell in far["cells"]] == [
        (depth, length, 4, 4) for depth in (0, 0.5, 1) for length in (192, 256)
    ]
    assert all(cell["found"] == 0 for cell in never["cells"])


def test_a_model_that_looks_back_120_tokens_finds_what_is_that_near(folder):
    options = NeedleOptions(lengths=(256,), depths=11, samples=4)
    cells = found_by(folder, "near", "needle", "story.jsonl", needle=options)["cells"]
    task = needle(folder, **{name: getattr(options, name) for name in ("lengths", "depths", "samples")})

    def near(window):
        text = bytes(window.tokens[1:].tolist())
        return len(text) - 5 - text.index(text[-5:] + b" and no other") <= 120

    assert [cell["found"] for cell in cells] == [sum(map(near, windows)) for windows in task.passes]
    assert 0 < sum(cell["found"] for cell in cells) < 44


# --- On the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(context=2, context_attention="heads"), marks=pytest.mark.ci),
        pytest.param(MeshConfig(context=4, context_attention="gather", data=2, zero=3), marks=pytest.mark.ci),
        pytest.param(MeshConfig(pipe=2, data=2, model=2, sequence_parallel=True), marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_every_mesh_has_the_figures_of_one_device(folder, mesh):
    cases = {
        ("near", "needle", "story.jsonl"): {"needle": NeedleOptions(lengths=(256,), depths=5)},
        ("never", "positions", "story.jsonl"): {},
    }
    for case, options in cases.items():
        one, many = found_by(folder, *case, **options), found_by(folder, *case, mesh=mesh, **options)
        assert one.keys() == many.keys()
        rows = {name for name in one if isinstance(one[name], list)}
        for name in one.keys() - rows:
            assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
        for name in rows:
            for row, other in zip(one[name], many[name], strict=True):
                assert other == pytest.approx(row, rel=1e-4, abs=1e-4)


def test_tables_and_pictures_show_the_results(folder, tmp_path, capsys):
    parse = partial(tyro.cli, EvaluateArguments)
    flags = ("--needle.lengths", 192, 256, "--needle.depths", 3, "--figure", tmp_path / "needle.png")
    assert evaluate(parse(args=argv(folder, "far", "needle", "story.jsonl", *flags))) == 0
    out, err = capsys.readouterr()
    table = [line.split() for line in out.splitlines()[-4:]]
    assert table == [["depth", "192", "256"]] + [[depth, "100%", "100%"] for depth in ("0%", "50%", "100%")]
    assert err.split()[-2:] == ["picture", str(tmp_path / "needle.png")]
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    flags = ("--positions.bins", 4, "--positions.spacing", "equal", "--figure", tmp_path / "positions.svg")
    assert evaluate(parse(args=argv(folder, "far", "positions", "repeated.jsonl", *flags))) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines()[-5:]]
    assert table[0] == ["positions", "loss", "±", "perplexity", "tokens"]
    assert [row[0] for row in table[1:]] == ["1", "65", "129", "193"]
    assert "<svg" in (tmp_path / "positions.svg").read_text()
    assert (
        evaluate(parse(args=argv(folder, "far", "positions", "repeated.jsonl", "--positions.bins", 4, "--json"))) == 0
    )
    values = json.loads(capsys.readouterr().out)
    assert [row["first"] for row in values["bins"]] == bin_edges(SEQUENCE, 4, "log")[:-1].tolist()
    assert all(one["last"] + 1 == other["first"] for one, other in pairwise(values["bins"]))


@pytest.mark.parametrize(
    ("task", "flags", "sentence"),
    [
        (
            "needle",
            ("--needle.lengths", 257),
            "--needle.lengths 257 is longer than the model's sequence of 256 tokens; ",
        ),
        ("needle", ("--needle.lengths", 40), "a text of --needle.lengths 40 tokens has no room for a fact and its"),
        ("needle", ("--needle.depths", 1), "--needle.depths is 1; it must be at least 2"),
        ("needle", ("--needle.samples", 0), "--needle.samples is 0; it must be at least 1"),
        ("needle", ("--overlap", 8), "--overlap is for wikitext103, lambada or perplexity; leave it out, needle cuts"),
        ("needle", ("--figure", "needle.jpg"), "--figure needle.jpg is not a picture"),
        ("needle", ("--positions.bins", 3), "flags that begin with --positions are for --task positions; leave them"),
        ("positions", ("--needle.seed", 3), "flags that begin with --needle are for --task needle; leave them out for"),
        ("positions", ("--positions.length", 257), "--positions.length 257 does not fit a model of 256 positions; use"),
        ("positions", ("--positions.bins", 0), "--positions.bins is 0; it must be at least 1"),
        ("perplexity", ("--figure", "x.png"), "--figure is for positions or needle; leave it out, perplexity has no"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, capsys, task, flags, sentence):
    assert cli.main(["evaluate", *argv(folder, "far", task, "story.jsonl", *flags)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_text_that_is_too_short_is_refused_with_what_would_do(folder, tmp_path):
    short = written(tmp_path / "short.jsonl", "a" * 100, "b" * 90)
    with pytest.raises(UsageError, match=r"no document of 256 tokens, the longest has 100; .* --positions.length 64$"):
        Positions(str(short), BYTES, LlamaConfig(sequence=256), PositionsOptions())
    with pytest.raises(
        UsageError, match=r"has 190 tokens and a text of 512 needs .* of filler; give more text, or lower"
    ):
        Needle(str(short), BYTES, LlamaConfig(sequence=512), NeedleOptions())


def test_the_scores_of_a_needle_are_those_of_its_cells(folder):
    task = needle(folder, lengths=(200, 256), depths=2, samples=2)
    scores = [Score(1.0, 4, 4, 2, 2), Score(1.0, 4, 3, 2, 1), Score(1.0, 4, 0, 2, 0), Score(1.0, 4, 2, 2, 1)]
    values = {metric.name: metric.value for metric in task.metrics(scores)}
    assert values["found"] == 0.5
    assert values["correct_tokens"] == 9 / 16
    assert [cell["found"] for cell in values["cells"]] == [2, 1, 0, 1]
    np.testing.assert_array_equal(task._shares(scores), [[1, 0.5], [0, 0.5]])
