"""Generation: the cache against the full forward pass, and the command."""

import io
import json
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands import cli
from mjax.commands.generate import GenerateArguments
from mjax.commands.generate import generate as run_generate
from mjax.config import MeshConfig, save_config
from mjax.config.kernels import pad_width
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.generation import text as generation
from mjax.generation.generate import Generator, Sampling, inference_weights, list_layers
from mjax.models.build import build_model
from mjax.models.decoding import KeyValues, attend_cached, decode, prefill, write_cache
from mjax.models.gpt.model import GPT
from mjax.models.parts.mask import AttentionMask
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import split_into_virtual_stages
from mjax.step.layout import build_layout
from tests.small import BLOOM, small_config

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]  # as many in every test: another number is another program
GREEDY = Sampling(tokens=6, temperature=0)
HOT = Sampling(tokens=6, temperature=1.5, top_k=20, top_p=0.95, seed=3)
ONE = MeshConfig()
PIPELINE = MeshConfig(pipe=2, data=2, model=2, virtual_stages=2, zero=3)
QWEN = {"kind": "llama", "kv_heads": 2, "head_dim": 6, "qk_norm": "head", "tie_embeddings": True}
OLMO = {"kind": "llama", "kv_heads": 4, "qk_norm": "heads", "norms": "post", "window": 6}
ALTERNATING = {**OLMO, "layers": 4, "global_attention_interval": 2}
GEMMA = {"kind": "gemma3", "kv_heads": 2, "head_dim": 6, "window": 6, "layers": 5, "global_attention_interval": 2}
GATHERED = {"context": 4, "context_attention": "allgather"}


def placed(generator, build):
    return jax.jit(build, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, generator.abstract_model))()


def lively(config, dtype=jnp.float32):
    """A model whose logits differ enough from each other for a token to follow from the ones before it."""
    return jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, config.model, dtype))


@cache
def generator_and_model(mesh=ONE):
    config = replace(small_config(layers=4, heads=4), mesh=mesh)
    generator = Generator(config, make_mesh(mesh))
    return generator, placed(generator, lambda: split_into_virtual_stages(lively(config), mesh))


@pytest.mark.parametrize("sequences", [1, 2])
def test_loop_over_tokens_writes_the_cache_in_place(sequences):
    def step(_, carry):
        x, cached, lengths = carry
        cached = write_cache(cached, KeyValues(x, x), lengths, jnp.arange(16))
        x = attend_cached(x, *cached, lengths, jnp.arange(16), AttentionMask())
        return x, cached, lengths + 1

    cache = jax.ShapeDtypeStruct((sequences, 2, 16, 4), jnp.float32)
    carry = (
        jax.ShapeDtypeStruct((sequences, 1, 2, 4), jnp.float32),
        KeyValues(cache, cache),
        jax.ShapeDtypeStruct((sequences,), jnp.int32),
    )
    compiled = jax.jit(lambda carry: jax.lax.fori_loop(0, 8, step, carry), donate_argnums=0).lower(carry).compile()
    loop = compiled.as_text().partition("\nENTRY")[0]
    written = f"f32[{sequences},2,16,4]"
    assert written in loop
    assert not [line for line in loop.splitlines() if f"= {written}" in line and " copy(" in line]


def ends(*ids):
    """Ids that end a text; always as many, for the same program."""
    return [*ids, *[-1] * (60 - len(ids))]


def generate(sampling, prompts=PROMPTS, eod=(), mesh=ONE, listener=None):
    generator, model = generator_and_model(mesh)
    return generator.generate(model, prompts, sampling, ends(*eod), listener)


def tokens_of(continuations):
    return [continuation.tokens for continuation in continuations]


# --- The cache --------------------------------------------------------------------------------------------------------


def ci(*case):
    return pytest.param(*case, marks=pytest.mark.ci)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {**ALTERNATING, "mesh": {"context": 2}}),
        ci(1, {**BLOOM, "window": 4, "mesh": GATHERED}),
        ci(1, {"window": 1}),
        ci(2, GEMMA),
        ci(4, QWEN),
        ci(4, {**OLMO, "kv_heads": 1}),
        ci(2, {**BLOOM, "mesh": {"context": 2}}),
    ],
)
def test_cache_gives_logits_of_full_forward(ranks, changes):
    lengths, steps = np.array([3, 1, 7], np.int32), 3

    def logits_of_both(model, tokens):
        prompts = jnp.where(jnp.arange(8) < lengths[:, None], tokens[:, :8], 0)
        layout = build_layout(config, mesh)
        weights = inference_weights(config, layout, model)
        layers = list_layers(config, layout, weights)
        row, cached = prefill(weights, prompts, jnp.asarray(lengths), 16, layers, config.context_attention)
        rows, read = [row], jnp.asarray(lengths)
        for _ in range(steps):
            row, cached = decode(weights, tokens[jnp.arange(3), read], cached, read, layers)
            rows, read = [*rows, row], read + 1
        return jnp.stack(rows, 1), model(tokens)

    with jax.enable_x64(True):
        config = small_config(model=ranks, compute="fp64", **changes)
        mesh = make_mesh(config.mesh)
        generator = Generator(config, mesh)
        model = placed(generator, partial(lively, config, jnp.float64))
        tokens = np.random.default_rng(0).integers(0, 60, (3, 16)).astype(np.int32)
        program = jax.shard_map(
            logits_of_both,
            mesh=mesh,
            in_specs=(jax.tree.map(lambda weight: weight.sharding.spec, model), P()),
            out_specs=(P(), P(None, None, "model")),
            check_vma=True,
        )
        decoded, full = map(np.asarray, jax.jit(program)(model, tokens))

    assert full.dtype == np.float64
    assert np.abs(full).max() > 1
    for row, rows, length in zip(full, decoded, lengths, strict=True):
        np.testing.assert_allclose(rows, row[length - 1 : length + steps], rtol=0, atol=1e-12)


def test_greedy_tokens_are_argmax_of_full_forward():
    generator, model = generator_and_model()
    specs, mesh = nnx.get_partition_spec(model), make_mesh(ONE)
    forward = jax.jit(jax.shard_map(GPT.__call__, mesh=mesh, in_specs=(specs, P()), out_specs=P(None, None, "model")))
    found = tokens_of(generate(GREEDY))
    texts = np.zeros((3, 16), np.int32)
    for text, prompt, tokens in zip(texts, PROMPTS, found, strict=True):
        text[: len(prompt) + 6] = [*prompt, *tokens]
    logits = np.asarray(forward(model, texts))[..., : generator.config.model.vocabulary]
    for row, prompt, tokens in zip(logits, PROMPTS, found, strict=True):
        assert row[len(prompt) - 1 :][:6].argmax(-1).tolist() == tokens
    assert len({tuple(tokens) for tokens in found}) == 3


@pytest.mark.parametrize(
    "mesh",
    [
        PIPELINE,
        *map(ci, (MeshConfig(data=2, model=2, zero=3, sequence_parallel=True), MeshConfig(pipe=4, model=2, zero=1))),
        ci(MeshConfig(pipe=2, context=2, model=2, context_attention="allgather")),
    ],
    ids=str,
)
def test_mesh_writes_what_one_device_writes(mesh):
    for sampling in (GREEDY, HOT):
        assert tokens_of(generate(sampling, mesh=mesh)) == tokens_of(generate(sampling))


def test_continuation_depends_on_seed_and_own_prompt():
    together = tokens_of(generate(HOT))
    assert tokens_of(generate(HOT, [PROMPTS[0], [1], [2]]))[0] == together[0]
    first, twin, _ = tokens_of(generate(HOT, [[1, 2]] * 3))
    assert first != twin
    assert tokens_of(generate(replace(HOT, seed=1), [[1, 2]] * 3))[0] != first


def test_prompts_draw_with_noise_of_their_streams():
    generator, model = generator_and_model()
    listed = tokens_of(generator.generate(model, [[1, 2]] * 3, HOT, ends(), streams=[2, 0, 2**32 - 1]))
    by_index = tokens_of(generate(HOT, [[1, 2]] * 3))
    assert listed[:2] == [by_index[2], by_index[0]]
    assert listed[2] not in by_index


def programs(generator):
    return [program._cache_size() for program in (generator._weights, generator._read, generator._write)]


def test_similar_request_compiles_nothing():
    generator, _ = generator_and_model()
    generate(HOT)
    compiled = programs(generator)
    generate(Sampling(tokens=7, temperature=0, top_k=3, top_p=0.5, seed=9), [[1], [2], [3, 4, 5]], eod=[3])
    assert programs(generator) == compiled


@pytest.mark.parametrize(
    ("mesh", "attention", "needed", "width"),
    [
        ({}, "xla", 17, 24),
        ({}, "xla", 500, 512),
        ({"context": 3, "context_attention": "allgather"}, "xla", 17, 24),
        ({}, "flash", 5, 64),  # a block of 64 positions is the least the kernel takes
        ({"context": 2, "context_attention": "allgather"}, "flash", 5, 256),  # every half of a rank's queries
    ],
)
def test_widths_are_few_and_kernel_and_mesh_divide_them(mesh, attention, needed, width):
    model = replace(small_config(sequence=512, heads=4).model, attention=attention)
    config = replace(small_config(), model=model, mesh=MeshConfig(**mesh))
    assert pad_width(config, needed, 16) == width


def test_cache_holds_prompts_that_are_padded_beyond_the_end():
    """33 tokens are read in 48 positions; they and two more fit into 40 slots."""
    config = small_config(sequence=64, heads=4)
    generator = Generator(config, make_mesh(ONE))
    model = generator.prepare(placed(generator, lambda: lively(config)))
    prompt = list(range(1, 34))
    (found,) = tokens_of(generator.generate(model, [prompt], replace(GREEDY, tokens=2), eod=-1))
    (logits,) = generator.read("logits", model, [prompt + found[:1]])
    assert found == logits[32:].argmax(-1).tolist()


# --- Where a continuation ends ----------------------------------------------------------------------------------------


def test_sequence_stops_before_its_end_of_document():
    """The others go on, and what they write stays the same."""
    free = tokens_of(generate(GREEDY))
    eod = free[1][3]
    assert eod not in free[1][:3]
    found = generate(GREEDY, eod=[eod])
    assert found[1].ended == "eod"
    for before, after in zip(free, found, strict=True):
        cut = before.index(eod) if eod in before else len(before)
        assert after.tokens == before[:cut]
        assert after.ended == ("eod" if eod in before else "tokens")
    assert any(continuation.ended == "tokens" for continuation in found)


def test_continuation_uses_every_position():
    """A text that is full has not ended, whatever would follow it."""
    long, prompts = Sampling(tokens=1000, temperature=0), [[1, 2, 3], [1] * 15, [4]]
    found = generate(long, prompts)
    assert [len(continuation.tokens) for continuation in found] == [13, 1, 15]
    assert {continuation.ended for continuation in found} == {"positions"}
    assert tokens_of(found)[0][:6] == tokens_of(generate(GREEDY))[0]
    hot = replace(long, temperature=3.0, top_p=1.0)
    found = generate(hot, prompts)
    assert generate(hot, prompts, eod=set(range(60)) - {tokens[0] for tokens in tokens_of(found)})[1] == found[1]


def test_padding_of_vocabulary_is_never_generated():
    generator, model = generator_and_model()
    loud, signs = jax.tree.map(lambda weight: weight, model), jnp.sign(jnp.arange(32) - 15.5)
    loud.embedding.table[...] = model.embedding.table[...].at[60:].set(signs * 50)
    loud.final_norm.bias[...] = signs * 5.0
    for sampling in (GREEDY, HOT):
        found = tokens_of(generator.generate(loud, PROMPTS, sampling, ends()))
        assert max(max(tokens) for tokens in found) < 60


# --- What is rejected -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "setting", "words"),
    [
        (PROMPTS, {"tokens": 0}, "--tokens is 0"),
        (PROMPTS, {"top_p": 0.0}, "--top-p is 0.0"),
        ([[1], []], {}, "prompt 2 is empty"),
        ([[1] * 16], {}, "shorten it to 15 tokens"),
        ([[1, 60]], {}, "token ids from 1 to 60"),
    ],
)
def test_impossible_request_is_rejected(prompts, setting, words):
    with pytest.raises(UsageError, match=words):
        generate(replace(GREEDY, **setting), prompts)


# --- Listening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [ONE, ci(MeshConfig(model=2))], ids=str)
def test_listener_hears_every_token_and_end(mesh):
    """Once and in order, by the programs that run without a listener."""
    plain, heard = generate(HOT), [[], [], []]
    eod = [plain[0].tokens[2], plain[1].tokens[2]]
    alone = generate(HOT, eod=eod, mesh=mesh)
    compiled = programs(generator_and_model(mesh)[0])
    found = generate(HOT, eod=eod, mesh=mesh, listener=lambda index, *told: heard[index].append(told))
    assert found == alone
    assert programs(generator_and_model(mesh)[0]) == compiled
    assert found[0].ended == "eod"
    for prompt, continuation, told in zip(PROMPTS, found, heard, strict=True):
        tokens = [*continuation.tokens, *[None] * (continuation.ended == "eod")]
        assert told == [(len(prompt) + number, token) for number, token in enumerate(tokens)]


def test_error_while_showing_ends_command():
    generator, model = generator_and_model()

    def closed(texts):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generation.continue_ids(generator, model, ByteTokenizer().decode, ["x"] * 3, PROMPTS, GREEDY, ends(), closed)
    assert generate(GREEDY)


def test_continuation_keeps_its_first_space():
    class Spaced(ByteTokenizer):
        """Drops the first character if it is a space, as sentencepiece may."""

        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    class Fixed:
        def generate(self, model, prompts, sampling, eod, listener):
            return [generation.Continuation(list(b" city"), "tokens") for _ in prompts]

    (sample,) = generation.continue_ids(Fixed(), None, Spaced().decode, ["The"], [list(b"The")], GREEDY, 256)
    assert (sample.prompt, sample.continuation) == ("The", " city")
    assert (sample.prompt_tokens, sample.tokens) == (3, 5)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of an untrained model of bytes with checkpoints 10 and 20: `run` has a tokenizer, `bare` has none, `copied`
    has an empty folder, `small` too few embeddings and `empty` no checkpoint."""
    place = tmp_path_factory.mktemp("runs")
    config = small_config(model=2, vocabulary=257, sequence=64, attention="auto")
    generator = Generator(config, make_mesh(config.mesh))
    model = placed(generator, partial(lively, config))
    with Checkpoints(place / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": model, "step": jnp.int32(10)})
        checkpoints.save(20, {"model": jax.tree.map(lambda weight: -weight, model), "step": jnp.int32(20)})
    for name in ("run", "bare", "copied", "small", "empty"):
        (place / name).mkdir()
        save_config(small_config(vocabulary=60) if name == "small" else config, place / name / "config.json")
        if name != "empty":
            (place / name / "checkpoints").symlink_to(place / "checkpoints")
    (place / "copied" / "tokenizer").mkdir()
    ByteTokenizer().save(place / "run" / "tokenizer")
    return place


def output(capsys, run, *flags):
    run_generate(tyro.cli(GenerateArguments, args=["--run", str(run), *map(str, flags)]))
    return capsys.readouterr()


def test_streamed_texts_equal_json_lines(place, capsys, monkeypatch):
    """Several samples of each line of stdin, up to the end of the positions; the second time with a given tokenizer."""
    outputs = []
    for flags in ((place / "run",), (place / "bare", "--tokenizer", "bytes", "--json")):
        monkeypatch.setattr("sys.stdin", io.StringIO("The\n\nIn [1]\n"))
        outputs.append(output(capsys, *flags, "--tokens", 200, "--num-samples", 2))
    lines = [json.loads(line) for line in outputs[1].out.splitlines()]
    assert [line["prompt"] for line in lines] == ["The", "The", "In [1]", "In [1]"]
    assert [(line["step"], line["prompt_tokens"]) for line in lines] == [(20, 3), (20, 3), (20, 6), (20, 6)]
    assert lines[0]["continuation"] != lines[1]["continuation"]
    assert outputs[0].out == "\n\n".join(line["prompt"] + line["continuation"] for line in lines) + "\n"
    notice = " ".join(outputs[0].err.split())
    assert "prompt 4: stopped after 58 of 200 tokens, because the model has 64 positions" in notice


@pytest.mark.ci
def test_generate_uses_given_step_and_devices(place, capsys):
    given = (place / "run", "--prompt", "The", "--tokens", 12, "--json")
    newest = output(capsys, *given).out
    assert output(capsys, *given, "--mesh.model", 2).out == newest
    older = json.loads(output(capsys, *given, "--step", 10).out)
    assert older["step"] == 10
    assert older["continuation"] != json.loads(newest)["continuation"]


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        ("run", "--step 15", "has no checkpoint 15; there are 10, 20"),
        ("run", "--mesh.model 3", "--mesh.model 3 does not divide heads 8"),
        ("run", "--mesh.model 2", "--mesh.model 2 needs 2 devices; 1 available"),
        ("run", "--num-samples 3 --temperature 0", "one text 3 times"),
        ("run", "--prompt -", "stdin is not UTF-8"),
        ("bare", "", "add the one its model was trained with"),
        ("copied", "", "has no mjax_tokenizer.json"),
        ("small", "--tokenizer bytes", "--tokenizer bytes has 257 ids"),
        ("empty", "--tokenizer bytes", "has no checkpoint; give a run that has saved one"),
    ],
)
def test_generate_rejects_wrong_flags_and_runs(place, run, flags, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    assert cli.main(["generate", "--run", str(place / run), "--prompt", "x", *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_closed_stdin_is_not_a_prompt(place, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["generate", "--run", str(place / "run")]) == 2
    assert "there is no prompt" in capsys.readouterr().err
