"""The Python interface of a trained run: its texts, its ids and its logits, on any mesh."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mjax
from mjax.checkpoint.arrays import leaves_by_path
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.config import MeshConfig, read_config, save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.models.build import build_model
from mjax.parallel.weights import leaf_name
from tests import reference
from tests.conftest import ROOT
from tests.small import batch_of, named, program_of, small_config, weights_of

CONFIG = small_config(layers=4, heads=4, vocabulary=257, dropout=0.0)
TEXTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_config(CONFIG, folder / "config.json")
    ByteTokenizer().save(folder / "tokenizer")
    model = jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, CONFIG.model, jnp.float32))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(7, {"model": model})
    return folder


def test_texts_and_their_ids_have_same_continuation(run):
    texts = ["The city", "A"]
    samples = mjax.generate(run, texts, tokens=6, temperature=0)
    assert [sample.prompt for sample in samples] == texts
    ids = [list(text.encode()) for text in texts]
    continued = mjax.generate(run, ids=ids, tokens=6, temperature=0)
    assert [bytes(one.tokens).decode(errors="replace") for one in continued] == [one.continuation for one in samples]
    opened = mjax.open_run(run, mesh=MeshConfig(model=2))
    again = mjax.generate(opened, texts, num_samples=2, tokens=6, temperature=0)
    assert [sample.continuation for sample in again[::2]] == [sample.continuation for sample in samples]
    assert len(again) == 4


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(context=2, model=2),
        pytest.param(MeshConfig(pipe=2, data=2, model=2, virtual_stages=2), marks=pytest.mark.ci),
        pytest.param(MeshConfig(context=2, context_attention="allgather"), marks=pytest.mark.ci),
    ],
    ids=["ulysses", "pipeline", "allgather"],
)
def test_logits_are_those_of_one_forward_pass(mesh, run):
    opened = mjax.open_run(run)
    found = mjax.logits(run, TEXTS, mesh=mesh)

    def forward(model, text):
        return jax.shard_map(
            lambda model, ids: model(ids),
            mesh=opened.mesh,
            in_specs=(jax.P(), jax.P()),
            out_specs=jax.P(None, None, "model"),
        )(model, jnp.asarray([text]))

    for logits, text in zip(found, TEXTS, strict=True):
        whole = np.asarray(forward(opened.weights, text))[0, :, :257]
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, whole, atol=1e-4)


# --- Inside a model ---------------------------------------------------------------------------------------------------

INSIDE = (mjax.hidden_states, mjax.attention_weights, mjax.log_probs, mjax.gradients)
KINDS = {
    "gpt": {"positions": "learned"},
    "llama": {"kind": "llama", "kv_heads": 2, "window": 4},
    "mixture": {"kind": "mixture", "kv_heads": 2, "experts": 4, "z_loss": 0.1},
    "gemma3": {"kind": "gemma3", "kv_heads": 2, "window": 4, "global_attention_interval": 2},
    "bert": {"kind": "bert"},
}
FSDP, SEQUENCE_PARALLEL = {"data": 2, "model": 2, "zero": 3}, {"model": 4, "sequence_parallel": True}
ALLGATHER = {"context": 2, "context_attention": "allgather", "data": 2}
MESHES = [
    ("gpt", SEQUENCE_PARALLEL), ("gpt", {"context": 2, "model": 2}), ("gpt", ALLGATHER), ("llama", {"model": 4}),
    ("llama", ALLGATHER), ("mixture", FSDP), ("mixture", {"data": 2, "expert": 2}), ("gemma3", SEQUENCE_PARALLEL),
    ("bert", FSDP), ("bert", {"context": 2, "model": 2}),
]  # fmt: skip
MESHES = [("gpt", FSDP), *(pytest.param(kind, mesh, marks=pytest.mark.ci) for kind, mesh in MESHES)]


def run_of(config, folder):
    """A run folder with the weights of `weights_of`."""
    save_config(config, folder / "config.json")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, {"model": jax.tree.map(jnp.asarray, weights_of(config))})
    return folder


def inside_of_twin(config, text, monkeypatch):
    """Hidden states and attention weights of a text by the serial reference."""
    model, weights, heads = config.model, named(weights_of(config)), []
    batch = {name: np.array([text]) * (name == "tokens") for name in ("tokens", "token_types")}

    def record(p, rate, masks, place):
        if p.ndim == 4:
            heads.append(np.asarray(p)[0])
        return p

    monkeypatch.setattr(reference, "drop", record)
    body = {name: array for name, array in weights.items() if not name.startswith("final_norm")}
    layers = reference.layers_of(weights)
    states = []
    for depth in range(len(layers) + 1):
        heads.clear()
        monkeypatch.setattr(reference, "layers_of", lambda _, depth=depth: layers[:depth])
        states.append(np.asarray(reference.encoded(body, model, batch)[0][0]))
    return np.stack(states), np.stack(heads)


@pytest.mark.parametrize(("kind", "mesh"), MESHES)
def test_inside_of_model_equals_float64_twin(kind, mesh, tmp_path, monkeypatch):
    """Hidden states, attention weights, log-probabilities and gradients of texts of several lengths."""
    config = small_config(layers=2, heads=4, dropout=0.0, **KINDS[kind])
    run = mjax.open_run(run_of(config, tmp_path), mesh=mesh)
    states, heads = mjax.hidden_states(run, TEXTS), mjax.attention_weights(run, TEXTS)
    texts = [np.array(text) for text in TEXTS]
    with jax.enable_x64(True):
        for text, state, weights in zip(texts, states, heads, strict=True):
            expected = inside_of_twin(config, text, monkeypatch)
            for found, one in zip((state, weights), expected, strict=True):
                assert found.dtype == np.float32
                np.testing.assert_allclose(found, one, atol=2e-5 * np.abs(one).max())
    monkeypatch.undo()
    if kind == "bert":
        return
    rows = np.zeros((len(TEXTS), config.model.sequence + 1), int)
    for row, text in zip(rows, TEXTS, strict=True):
        row[: len(text)] = text
    counted = np.arange(config.model.sequence) < np.array([[len(text) - 1] for text in TEXTS])
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": counted}
    with jax.enable_x64(True):
        weights = {name: np.float64(weight) for name, weight in named(weights_of(config)).items()}
        scores = jax.nn.log_softmax(reference.scores(weights, config.model, batch), -1)
        model = replace(config.model, aux_loss_coef=0.0, z_loss=0.0) if kind == "mixture" else config.model
        figures, expected = reference.loss_and_gradients(weights, model, batch)
    loss, gradients = mjax.gradients(run, TEXTS)
    assert loss == pytest.approx(float(np.ravel(figures)[0]), rel=1e-6)
    for name, gradient in gradients.items():
        weight, scale = leaves_by_path(run.weights)[name], np.abs(expected[name]).max()
        assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)
        np.testing.assert_allclose(np.asarray(gradient), expected[name], atol=3e-5 * scale, err_msg=name)
    for row, text, found in zip(scores, TEXTS, mjax.log_probs(run, TEXTS), strict=True):
        assert found.shape == (len(text) - 1,)
        np.testing.assert_allclose(found, [row[i, token] for i, token in enumerate(text[1:])], atol=1e-5)


def test_inside_of_model_in_bf16_is_near_float32(run, tmp_path):
    """bf16 is the default of training: every function reads such a run."""
    config = replace(CONFIG, precision=replace(CONFIG.precision, compute="bf16"))
    shutil.copytree(run, tmp_path / "run")
    save_config(config, tmp_path / "run" / "config.json")
    for function in INSIDE[:3]:
        for found, exact in zip(function(tmp_path / "run", TEXTS), function(run, TEXTS), strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, exact, atol=0.2 * np.abs(exact).max(initial=1))
    loss, gradients = mjax.gradients(tmp_path / "run", TEXTS)
    exact, _ = mjax.gradients(run, TEXTS)
    assert loss == pytest.approx(exact, rel=0.1)
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients.values())


def test_inside_of_model_of_pipeline(run):
    """Log-probabilities and gradients work; the functions that read single layers say what to use."""
    opened, alone = mjax.open_run(run, mesh={"pipe": 2, "data": 2}), mjax.open_run(run)
    for function in INSIDE[:2]:
        with pytest.raises(UsageError, match=rf"^mjax.{function.__name__[8:]} is not supported with mesh.pipe 2; use"):
            function(opened, TEXTS)
    for found, expected in zip(mjax.log_probs(opened, TEXTS), mjax.log_probs(alone, TEXTS), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    (loss, gradients), (alone, expected) = mjax.gradients(opened, TEXTS), mjax.gradients(alone, TEXTS)
    assert loss == pytest.approx(alone, rel=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(np.asarray(gradient), np.asarray(expected[name]), rtol=1e-3, atol=1e-4)


def test_impossible_inside_of_model_is_one_sentence(run, tmp_path):
    with pytest.raises(UsageError, match="no text has two tokens; give at least one"):
        mjax.gradients(run, [[1], [2]])
    with pytest.raises(UsageError, match='gradients in fp16 need a loss scale; add compute="fp32"'):
        mjax.gradients(run, TEXTS, compute="fp16")
    bert = run_of(small_config(heads=4, kind="bert"), tmp_path)
    for function in (mjax.log_probs, mjax.gradients):
        with pytest.raises(UsageError, match="holds a BERT, which predicts no next token"):
            function(bert, TEXTS)
    for function in INSIDE:
        with pytest.raises(UsageError, match="token ids from 300 to 300"):
            function(run, [[300]])


def test_weights_fit_a_program_of_another_kernel_and_sequence(run):
    opened = mjax.open_run(run)
    model = replace(CONFIG.model, attention="xla_blocks", positions="learned")
    program = mjax.build_program(replace(CONFIG, model=model), opened.mesh)
    batch = {name: np.zeros((8, 16), np.int32) for name in ("tokens", "labels")}
    assert program.eval_step(opened.weights_for(program.abstract_state.model), program.put_on_devices(batch))
    wider = mjax.build_program(replace(CONFIG, model=replace(model, sequence=32)), opened.mesh)
    with pytest.raises(UsageError, match=r"positions of .* has the shape \(16, 32\) and the program \(32,"):
        opened.weights_for(wider.abstract_state.model)


SHORTER = {
    "learned": ({"positions": "learned"}, MeshConfig()),
    "alibi": ({"positions": "alibi"}, MeshConfig(model=2, sequence_parallel=True)),
    "rotary": ({"kind": "llama"}, MeshConfig(context=2, context_attention="allgather")),
    "pipeline": ({"positions": "learned"}, MeshConfig(pipe=2, data=2)),
}


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.ci] * (one == "pipeline")) for one in SHORTER])
def test_program_takes_shorter_batch(case):
    """Loss and next weights equal a program whose config has that length."""
    options, mesh = SHORTER[case]
    config = replace(small_config(vocabulary=256, dropout=0.1, **options), mesh=mesh)
    short = replace(config, model=replace(config.model, sequence=8))
    batch = {name: array[:, :8] for name, array in batch_of(config).items()}
    program, narrow = program_of(config), program_of(short)
    state = program.initialize()

    def cut(path, weight):
        return np.asarray(weight)[:8] if leaf_name(path) == "positions" else np.asarray(weight)

    weights = jax.tree_util.tree_map_with_path(cut, state.model)
    target = narrow.abstract_state.model
    weights = jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(weights))
    begun = narrow.begin(jax.device_put(weights, jax.tree.map(lambda leaf: leaf.sharding, target)))
    assert float(program.eval_step(state.model, program.put_on_devices(batch)).loss) == pytest.approx(
        float(narrow.eval_step(begun.model, narrow.put_on_devices(batch)).loss), rel=1e-6
    )
    found, expected = (
        one.train_step(start, one.put_on_devices(batch)) for one, start in ((program, state), (narrow, begun))
    )
    assert float(found[1].loss) == pytest.approx(float(expected[1].loss), rel=1e-6)
    assert float(found[1].grad_norm) == pytest.approx(float(expected[1].grad_norm), rel=1e-5)


@pytest.mark.parametrize(
    ("lengths", "mesh", "words"),
    [
        ((17, 17), MeshConfig(), "the batch has sequences of 17 and model.sequence is 16; give 1 to 16"),
        ((8, 4), MeshConfig(), "tokens of the batch has 8 positions and labels 4; give equal lengths"),
        ((6, 6), MeshConfig(context=2, context_attention="allgather"), "give a multiple of 4"),
        ((7, 7), MeshConfig(model=2, sequence_parallel=True), "give a multiple of 2"),
    ],
    ids=["long", "unequal", "context", "sequence parallel"],
)
def test_batch_of_impossible_length_is_one_sentence(lengths, mesh, words):
    program = program_of(replace(small_config(vocabulary=256), mesh=mesh))
    batch = {name: np.zeros((8, size), np.int32) for name, size in zip(("tokens", "labels"), lengths, strict=True)}
    with pytest.raises(UsageError, match=words):
        program.put_on_devices(batch)


@pytest.mark.parametrize("use", [mjax.open_run, partial(mjax.logits, ids=TEXTS), partial(mjax.generate, ids=TEXTS)])
def test_mesh_that_does_not_divide_is_refused(use, run):
    with pytest.raises(UsageError, match=r"^mesh.model 3 does not divide heads 4; use 1, 2 or 4$"):
        use(run, mesh=MeshConfig(model=3))
    with pytest.raises(UsageError, match=r"^mesh.pipe 5 is more than a GPT can fill with 4 layers"):
        use(run, mesh={"pipe": 5})
    with pytest.raises(UsageError, match="unknown field tensor"):
        use(run, mesh={"tensor": 3})


def test_weights_called_outside_mesh_are_one_sentence(run):
    with pytest.raises(UsageError, match=r"within jax.shard_map .* call mjax.logits\(run, ids\)"):
        mjax.open_run(run).weights(jnp.array([[1, 2]]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either prompts or ids"),
        ({"prompts": "a", "ids": [[1]]}, "either prompts or ids"),
        ({"prompts": "a", "warmth": 1}, "mjax.generate has no argument warmth; it has tokens"),
        ({"ids": [[300]]}, "token ids from 300 to 300"),
        ({"ids": [[1]], "tokens": -1}, "^tokens is -1; it must"),
        ({"ids": [[1]], "top_k": -1}, "^top_k is -1; it must"),
        ({"ids": [[1]], "compute": "fp99"}, "^fp99 is not a value of precision.compute; use bf16"),
    ],
)
def test_impossible_request_is_one_sentence(options, words, run):
    with pytest.raises(UsageError, match=words):
        mjax.generate(run, **options)
    with pytest.raises(UsageError, match="the prompt has 17 tokens and the model 16 positions; shorten it to 16"):
        mjax.logits(run, [[1] * 17])


def test_errors_name_arguments_in_place_of_flags(run, tmp_path):
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer"))
    with pytest.raises(UsageError, match=r"has no tokenizer; add the one .*: tokenizer=\"KIND:FILES\""):
        mjax.generate(bare, "a")
    with pytest.raises(UsageError, match=r"^stride is for .*; remove it$"):
        mjax.evaluate(run, "positions", "x", stride=3)
    config = read_config(run / "config.json")
    with pytest.raises(UsageError, match=r"^max_sequence_on=8 needs gpu h100; add it$"):
        mjax.plan(config, max_sequence_on=8)
    with pytest.raises(UsageError, match=r"^mjax.plan has no argument gpus; did you mean gpu\?$"):
        mjax.plan(config, gpus="h100")
    for function in (mjax.plan, mjax.validate, lambda config: mjax.Trainer(config, tmp_path / "new")):
        with pytest.raises(UsageError, match=r"^config is 'gpt_demo', not a Config; .*load_config\('gpt_demo'\)$"):
            function("gpt_demo")
    with pytest.raises(UsageError, match=r"^mesh.model 3 does not divide heads"):
        mjax.validate(replace(config, mesh=MeshConfig(model=3)))
    for steps in ("5", 5.5, None):
        with pytest.raises(UsageError, match=rf"^train.steps is {steps!r}; it must be a whole number"):
            mjax.validate(replace(config, train=replace(config.train, steps=steps)))
    with pytest.raises(UsageError, match=r"the mesh needs 64 devices .*; there are .* call mjax.simulate\(64\) first"):
        mjax.make_mesh(MeshConfig(data=64))
    with pytest.raises(UsageError, match=r"64 devices cannot be simulated any more: JAX has started"):
        mjax.simulate(64)
    with pytest.raises(UsageError, match=r"prompts has 1, which is not text; give ids"):
        mjax.generate(run, [1, 2])


def test_type_checkers_know_the_interface(tmp_path):
    """Every name of `mjax`, though it is imported when it is first used."""
    file = tmp_path / "door.py"
    names = [name for name in mjax.__all__ if not name.startswith("_")]
    file.write_text("import mjax\n" + "".join(f"reveal_type(mjax.{name})\n" for name in names))
    command = [sys.executable, "-m", "pyrefly", "check", "--python-interpreter-path", sys.executable]
    shown = subprocess.run([*command, "--search-path", ROOT, file], capture_output=True, text=True).stdout
    types = re.findall("revealed type: (.*) \\[reveal-type\\]", shown)
    assert len(types) == len(names), shown
    assert not [found for found in types if found in ("Unknown", "Any", "Module")], shown
    assert sorted(mjax._LAZY_IMPORTS) == sorted(names)
