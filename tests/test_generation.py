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

from mjax import generation
from mjax.commands.generate import GenerateArguments
from mjax.commands.generate import generate as run_generate
from mjax.config import MeshConfig, read_config, save_config
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.generation import Generator, continue_texts
from mjax.inference import inference_config
from mjax.models.build import build_model
from mjax.models.gpt import GPT
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import cut_into_chunks
from mjax.sampling import Sampling
from mjax.state.checkpoint import Checkpoints
from tests.small import BLOOM, small_config

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
NO_EOD = -1
GREEDY = Sampling(tokens=6, temperature=0)
WINDOW = {"window": 4, **BLOOM}
QWEN = {"kind": "llama", "kv_heads": 2, "head_dim": 6, "qk_norm": "head", "tied": True}
OLMO = {"kind": "llama", "kv_heads": 4, "qk_norm": "heads", "norms": "post", "window": 6}


def with_shardings(generator, build):
    return jax.jit(build, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, generator.abstract_model))()


def lively(config):
    """A model whose logits differ enough from each other for a token to follow from the ones before it."""
    return jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, config.model))


@cache
def generator_and_model(data=1, model=1, sequence=16):
    config = small_config(data=data, model=model, sequence=sequence)
    generator = Generator(config, make_mesh(config.mesh))
    return generator, with_shardings(generator, partial(lively, config))


def generate(sampling, prompts=PROMPTS, eod=NO_EOD, mesh=(1, 1), sequence=16):
    generator, model = generator_and_model(*mesh, sequence=sequence)
    return generator.generate(model, prompts, sampling, eod)


def tokens_of(continuations):
    return [continuation.tokens for continuation in continuations]


@cache
def full_forward(sequence=16):
    """tokens [b, s] → logits of the whole forward pass [b, s, v]."""
    generator, model = generator_and_model(sequence=sequence)
    specs = nnx.get_partition_spec(model)
    mesh = make_mesh(generator.config.mesh)
    program = jax.jit(
        jax.shard_map(GPT.__call__, mesh=mesh, in_specs=(specs, P()), out_specs=P(None, None, "model"), check_vma=True)
    )
    return lambda tokens: np.asarray(program(model, jnp.asarray(tokens, jnp.int32)))


# --- The cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param((1, 1), {}, marks=pytest.mark.ci),
        ((1, 4), {}),
        pytest.param((1, 1), BLOOM, marks=pytest.mark.ci),
        ((1, 2), BLOOM),
        ((1, 1), {"window": 1}),
        pytest.param((1, 2), WINDOW, marks=pytest.mark.ci),
        ((1, 2), QWEN),
        pytest.param((1, 2), OLMO, marks=pytest.mark.ci),
        pytest.param((1, 4), QWEN, marks=pytest.mark.ci),
        pytest.param((1, 4), {**OLMO, "kv_heads": 1}, marks=pytest.mark.ci),
        ((1, 2), {**OLMO, "layers": 4, "full_attention_every": 2}),
        pytest.param((1, 2), {"mesh": {"context": 2}}, marks=pytest.mark.ci),
        pytest.param((1, 1), {"mesh": {"context": 4, "context_attention": "gather"}}, marks=pytest.mark.ci),
        ((1, 1), {**WINDOW, "mesh": {"context": 4, "context_attention": "gather"}}),
        pytest.param((1, 2), {**BLOOM, "mesh": {"context": 2}}, marks=pytest.mark.ci),
        pytest.param((1, 2), {**QWEN, "mesh": {"context": 2}}, marks=pytest.mark.ci),
        pytest.param(
            (1, 2), {**OLMO, "layers": 4, "full_attention_every": 2, "mesh": {"context": 2}}, marks=pytest.mark.ci
        ),
    ],
)
def test_decoding_with_the_cache_gives_the_logits_of_the_full_forward_pass_at_every_position(mesh, changes):
    lengths, last = np.array([3, 1, 7], np.int32), 12

    def logits_of_both(model, tokens):
        prompts = jnp.where(jnp.arange(8) < lengths[:, None], tokens[:, :8], 0)
        row, cached = model.prefill(prompts, jnp.asarray(lengths), 16, across=config.across)
        rows, read = [row], jnp.asarray(lengths)
        for _ in range(last - max(lengths)):
            row, cached = model.decode(tokens[jnp.arange(3), read], cached, read)
            rows, read = [*rows, row], read + 1
        return jnp.stack(rows, 1), model(tokens)

    with jax.enable_x64(True):
        config = small_config(data=mesh[0], model=mesh[1], compute="fp64", **changes)
        generator = Generator(config, make_mesh(config.mesh))

        def build():
            return jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, config.model, jnp.float64))

        model = with_shardings(generator, build)
        tokens = np.random.default_rng(0).integers(0, 60, (3, 16)).astype(np.int32)
        program = jax.shard_map(
            logits_of_both,
            mesh=make_mesh(config.mesh),
            in_specs=(jax.tree.map(lambda weight: weight.sharding.spec, model), P()),
            out_specs=(P(), P(None, None, "model")),
            check_vma=True,
        )
        decoded, full = map(np.asarray, jax.jit(program)(model, tokens))

    assert full.dtype == np.float64
    assert np.abs(full).max() > 1
    for row, rows, length in zip(full, decoded, lengths, strict=True):
        np.testing.assert_allclose(rows, row[length - 1 : length - 1 + len(rows)], rtol=0, atol=1e-12)


def test_greedy_tokens_are_the_argmax_of_the_full_forward_pass_done_again_for_each_token():
    forward = full_forward()
    found = tokens_of(generate(GREEDY))
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        text = list(prompt)
        for token in tokens:
            padded = np.zeros((1, 16), np.int32)
            padded[0, : len(text)] = text
            expected = forward(padded)[0, len(text) - 1, :60].argmax()
            assert token == expected
            text.append(int(expected))
    assert len({tuple(tokens) for tokens in found}) == 3


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
def test_the_same_tokens_come_out_on_every_mesh(mesh):
    for sampling in (GREEDY, Sampling(tokens=8, temperature=1.5, top_k=20, top_p=0.95, seed=3)):
        assert tokens_of(generate(sampling, mesh=mesh)) == tokens_of(generate(sampling))


def test_a_continuation_does_not_depend_on_the_prompts_after_it():
    sampling = Sampling(tokens=8, temperature=1.5, seed=3)
    together = tokens_of(generate(sampling))
    assert tokens_of(generate(sampling, PROMPTS[:1])) == together[:1]
    assert tokens_of(generate(sampling, [PROMPTS[0], [1], [2]]))[0] == together[0]


def test_another_seed_and_another_sequence_draw_other_tokens():
    hot = Sampling(tokens=8, temperature=3.0, top_p=1.0)
    first, twin = tokens_of(generate(hot, [[1, 2], [1, 2]]))
    assert first != twin
    assert tokens_of(generate(replace(hot, seed=1), [[1, 2], [1, 2]]))[0] != first


def test_a_request_of_similar_size_compiles_nothing(monkeypatch):
    traced = []
    prefill = GPT.prefill
    monkeypatch.setattr(GPT, "prefill", lambda *args: traced.append(1) or prefill(*args))
    config = small_config(sequence=64)
    generator = Generator(config, make_mesh(config.mesh))
    model = with_shardings(generator, partial(lively, config))
    generator.generate(model, [[1, 2, 3]], Sampling(tokens=10), NO_EOD)
    assert len(traced) == 1
    others = Sampling(tokens=7, temperature=0, top_k=3, top_p=0.5, seed=9)
    generator.generate(model, [[4, 5, 6, 7, 8]], others, 3)
    assert len(traced) == 1
    generator.generate(model, [list(range(20))], others, 3)
    assert len(traced) == 2


# --- Where a continuation ends ----------------------------------------------------------------------------------------


def test_a_sequence_stops_before_its_end_of_document_and_the_others_go_on():
    free = tokens_of(generate(GREEDY))
    eod = free[1][3]
    assert eod not in free[1][:3]
    found = generate(GREEDY, eod=eod)
    assert found[1].ended == "eod"
    for before, after in zip(free, found, strict=True):
        cut = before.index(eod) if eod in before else len(before)
        assert after.tokens == before[:cut]
        assert after.ended == ("eod" if eod in before else "tokens")
    assert any(continuation.ended == "tokens" for continuation in found)


def test_the_loop_ends_when_every_sequence_has_ended(monkeypatch):
    eod = tokens_of(generate(GREEDY, [[4]]))[0][3]
    steps = []
    counted = generation.draw

    def draw_and_count(*args, **settings):
        jax.debug.callback(lambda: steps.append(1))
        return counted(*args, **settings)

    monkeypatch.setattr(generation, "draw", draw_and_count)
    generator = Generator(small_config(), make_mesh(small_config().mesh))
    _, model = generator_and_model()
    generator.generate(model, [[4]], replace(GREEDY, tokens=15), eod)
    jax.effects_barrier()
    assert len(steps) == 4


def test_a_continuation_uses_every_position_and_says_that_they_are_used_up():
    found = generate(Sampling(tokens=1000, temperature=0), [[1, 2, 3], [1] * 15])
    assert [len(continuation.tokens) for continuation in found] == [13, 1]
    assert [continuation.ended for continuation in found] == ["positions", "positions"]
    assert tokens_of(found)[0][:6] == tokens_of(generate(GREEDY))[0]


def test_ids_that_pad_the_vocabulary_are_never_generated():
    generator, model = generator_and_model()
    table = model.embedding.table[...]
    loud = jax.tree.map(lambda weight: weight, model)
    loud.embedding.table[...] = table.at[60:].set(jnp.sign(jnp.arange(32) - 15.5) * 50)
    loud.final_norm.bias[...] = jnp.sign(jnp.arange(32) - 15.5) * 5.0
    for sampling in (GREEDY, Sampling(tokens=8, temperature=2.0, top_p=1.0)):
        found = tokens_of(generator.generate(loud, PROMPTS, sampling, NO_EOD))
        assert max(max(tokens) for tokens in found) < 60


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"tokens": 0}, "--tokens is 0; it must be at least 1"),
        ({"temperature": -0.1}, "--temperature is -0.1; it must be 0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_k": -1}, "--top-k is -1; it must be 0"),
        ({"top_p": 0.0}, "--top-p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "--top-p is 1.1; it must be above 0 and at most 1"),
        ({"seed": 2**32}, "--seed is 4294967296; it must be at least 0 and below"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_the_name_of_its_flag(setting, sentence):
    with pytest.raises(UsageError) as refused:
        generate(Sampling(**setting))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([], "there is no prompt; add --prompt TEXT"),
        ([[]], "the prompt is empty"),
        ([[1], []], "prompt 2 is empty"),
        ([[1] * 16], "the prompt has 16 tokens and the model 16 positions"),
        ([[1] * 16], "shorten it to 15 tokens or fewer"),
        ([[1, 60]], "the prompt has token ids from 1 to 60; the model has 0 to 59"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(prompts, sentence):
    with pytest.raises(UsageError) as refused:
        generate(GREEDY, prompts)
    assert sentence in str(refused.value)


# --- Text and the command ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of an untrained model of bytes, with checkpoints 10 and 20."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    config = small_config(model=2, vocabulary=257, sequence=64, attention="auto")
    generator = Generator(config, make_mesh(config.mesh))
    model = with_shardings(generator, partial(lively, config))
    with Checkpoints(folder / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": model, "step": jnp.int32(10)})
        checkpoints.save(20, {"model": jax.tree.map(lambda weight: -weight, model), "step": jnp.int32(20)})
    save_config(config, folder / "config.json")
    ByteTokenizer().save(folder / "tokenizer")
    return folder


def arguments_of(*flags):
    return tyro.cli(GenerateArguments, args=[str(flag) for flag in flags])


def test_the_command_prints_a_json_line_for_each_prompt_that_says_what_python_says(run_folder, capsys):
    flags = ("--temperature", 0, "--tokens", 12, "--prompt", "The", "--prompt", "In [1]", "--json")
    assert run_generate(arguments_of("--checkpoint", run_folder, *flags)) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["The", "In [1]"]
    assert [(line["step"], line["prompt_tokens"], line["tokens"]) for line in lines] == [(20, 3, 12), (20, 6, 12)]

    config = inference_config(read_config(run_folder / "config.json"), MeshConfig())
    generator = Generator(config, make_mesh(config.mesh))
    with Checkpoints(run_folder / "checkpoints") as checkpoints:
        _, model = checkpoints.restore(generator.abstract_model, field="model")
    sampling = Sampling(tokens=12, temperature=0)
    samples = continue_texts(generator, model, ByteTokenizer(), ["The", "In [1]"], sampling)
    assert [line["continuation"] for line in lines] == [sample.continuation for sample in samples]


def test_the_command_prints_prompt_and_continuation_as_plain_text_where_there_is_no_terminal(run_folder, capsys):
    flags = ("--checkpoint", run_folder, "--prompt", "In [1]", "--temperature", 0, "--tokens", 200)
    assert run_generate(arguments_of(*flags)) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("In [1]")
    assert "\x1b" not in captured.out.replace(captured.out[6:], "")
    notice = " ".join(captured.err.split())
    assert "prompt 1: stopped after 58 of 200 tokens, because the model has 64 positions" in notice


@pytest.mark.ci
def test_another_step_and_another_number_of_devices_can_be_chosen(run_folder, capsys):
    def output(*flags):
        run_generate(arguments_of("--checkpoint", run_folder, "--prompt", "The", "--tokens", 12, "--json", *flags))
        return json.loads(capsys.readouterr().out)

    assert output("--mesh.model", 2) == output()
    assert output("--step", 10)["step"] == 10
    assert output("--step", 10)["continuation"] != output()["continuation"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--prompt", ""), "the prompt is empty"),
        ((), "there is no prompt; add --prompt TEXT"),
        (("--prompt", "x" * 65), "the prompt has 65 tokens and the model 64 positions"),
        (("--prompt", "x", "--step", "15"), "has no checkpoint 15; there are 10, 20"),
        (("--prompt", "x", "--top-p", "3"), "--top-p is 3.0"),
        (("--prompt", "x", "--mesh.model", "3"), "--mesh.model 3 does not divide heads 8; use 1, 2, 4 or 8"),
        (("--prompt", "x", "--checkpoint", "nowhere"), "nowhere/config.json does not exist"),
    ],
)
def test_a_flag_that_cannot_work_is_answered_with_a_sentence(run_folder, flags, sentence, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(UsageError) as refused:
        run_generate(arguments_of("--checkpoint", run_folder, *flags))
    assert sentence in str(refused.value)


def test_a_run_without_a_tokenizer_continues_text_with_the_one_that_is_given(run_folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((run_folder / "config.json").read_text())
    (tmp_path / "checkpoints").symlink_to(run_folder / "checkpoints")
    flags = ("--temperature", 0, "--tokens", 12, "--prompt", "The", "--prompt", "In [1]", "--json")
    printed = []
    for folder, given in ((run_folder, ()), (tmp_path, ("--tokenizer", "bytes"))):
        assert run_generate(arguments_of("--checkpoint", folder, *flags, *given)) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    (tmp_path / "tokenizer").mkdir()  # as one that is copied from elsewhere
    with pytest.raises(UsageError, match=r"has no mjax_tokenizer\.json, .* --tokenizer KIND:FILES"):
        run_generate(arguments_of("--checkpoint", tmp_path, *flags))
    save_config(small_config(vocabulary=60), tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"--tokenizer bytes has 257 ids and the model of .* 60; add the one"):
        run_generate(arguments_of("--checkpoint", tmp_path, *flags, "--tokenizer", "bytes"))


def test_a_run_without_tokenizer_or_checkpoint_is_named(run_folder, tmp_path):
    (tmp_path / "config.json").write_text((run_folder / "config.json").read_text())
    with pytest.raises(UsageError, match=r"has no tokenizer; add the one .* trained with: --tokenizer KIND:FILES$"):
        run_generate(arguments_of("--checkpoint", tmp_path, "--prompt", "x"))
    ByteTokenizer().save(tmp_path / "tokenizer")
    with pytest.raises(UsageError, match="has no checkpoint; give a run that has saved one"):
        run_generate(arguments_of("--checkpoint", tmp_path, "--prompt", "x"))


def test_more_devices_than_there_are_is_refused(run_folder, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [object()])
    with pytest.raises(UsageError, match=r"--mesh\.model 2 needs 2 devices; 1 found: use --mesh\.model 1"):
        run_generate(arguments_of("--checkpoint", run_folder, "--prompt", "x", "--mesh.model", 2))


def test_a_continuation_keeps_the_space_that_its_first_token_begins_with():
    class Spaced(ByteTokenizer):
        """Drops the first character if it is a space, as sentencepiece may."""

        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    class Fixed:
        def generate(self, model, prompts, sampling, eod, listener):
            return [generation.Continuation(list(b" city"), "tokens") for _ in prompts]

    (sample,) = continue_texts(Fixed(), None, Spaced(), ["The"], GREEDY)
    assert (sample.prompt, sample.continuation) == ("The", " city")
    assert (sample.prompt_tokens, sample.tokens) == (3, 5)


# --- On the mesh of a training run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 2, "model": 2, "zero": 3, "sequence_parallel": True}, marks=pytest.mark.ci),
        pytest.param({"pipe": 4, "data": 1, "model": 2, "zero": 1}, marks=pytest.mark.ci),
        {"pipe": 2, "data": 2, "model": 2, "chunks": 2, "zero": 3},
        pytest.param({"pipe": 2, "context": 2, "model": 2, "context_attention": "gather"}, marks=pytest.mark.ci),
    ],
)
def test_a_model_spread_over_a_pipeline_or_in_shards_writes_what_one_device_writes(mesh):
    prompts, sampling = [[5, 6, 7], [9]], Sampling(tokens=6, temperature=1.0, seed=3)
    found = []
    for shape in ({}, mesh):
        mesh_config = MeshConfig(**shape)
        config = replace(small_config(layers=8, heads=4), mesh=mesh_config)
        generator = Generator(config, make_mesh(mesh_config))
        model = with_shardings(generator, lambda config=config: cut_into_chunks(lively(config), config.mesh))
        found.append(generator.generate(model, prompts, sampling, eod=NO_EOD))
    assert found[0] == found[1]
    assert found[0][0].tokens


@pytest.mark.parametrize(
    ("mesh", "width"), [({}, 64), ({"context": 2, "context_attention": "gather"}, 256), ({"context": 4}, 64)]
)
def test_prompts_are_as_wide_as_the_flash_kernel_and_the_mesh_need_them(mesh, width):
    """A block of 64 positions is the least it takes, and with gathered keys every half of a rank's queries."""
    model = replace(small_config(sequence=512, heads=4).model, attention="flash")
    config = replace(small_config(), model=model, mesh=MeshConfig(**mesh))
    assert Generator(config, make_mesh(config.mesh))._width(5) == width


# --- Streaming, standard input, several samples -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((1, 2), marks=pytest.mark.ci)])
def test_a_listener_hears_every_token_and_every_end(mesh):
    generator, model = generator_and_model(*mesh)
    sampling, heard = Sampling(tokens=6, temperature=1.5, seed=3), {}
    listener = lambda index, position, token: heard.setdefault((index, position), set()).add(token)  # noqa: E731
    plain = generator.generate(model, PROMPTS, sampling, NO_EOD)
    eod = plain[0].tokens[2]
    found = generator.generate(model, PROMPTS, sampling, [eod, 59], listener)
    assert found[0].ended == "eod"
    for index, (prompt, continuation) in enumerate(zip(PROMPTS, found, strict=True)):
        at = len(prompt)
        assert [heard[index, at + number] for number in range(len(continuation.tokens))] == [
            {token} for token in continuation.tokens
        ]
    assert heard[0, len(PROMPTS[0]) + len(found[0].tokens)] == {None}


def test_what_is_streamed_is_what_json_says_for_each_of_several_samples(run_folder, capsys, monkeypatch):
    flags = ("--checkpoint", run_folder, "--tokens", 12, "--num-samples", 2)
    outputs = []
    for more in ((), ("--json",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("The\n\nIn [1]\n"))
        assert run_generate(arguments_of(*flags, *more)) == 0
        outputs.append(capsys.readouterr().out)
    lines = [json.loads(line) for line in outputs[1].splitlines()]
    assert [line["prompt"] for line in lines] == ["The", "The", "In [1]", "In [1]"]
    assert lines[0]["continuation"] != lines[1]["continuation"]
    assert outputs[0] == "\n\n".join(line["prompt"] + line["continuation"] for line in lines) + "\n"


def test_what_goes_wrong_while_a_text_is_shown_ends_the_command_and_not_the_program(run_folder):
    generator, model = generator_and_model()

    def closed(texts):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generation.continue_ids(generator, model, ByteTokenizer().decode, ["x"], [[1]], GREEDY, NO_EOD, closed)
    assert generate(GREEDY)


def test_prompts_that_are_not_text_are_refused(run_folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(UsageError, match="stdin is not UTF-8"):
        run_generate(arguments_of("--checkpoint", run_folder))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="there is no prompt"):
        run_generate(arguments_of("--checkpoint", run_folder))


def test_equal_samples_are_refused(run_folder):
    with pytest.raises(UsageError, match="--num-samples 3 with --temperature 0 would be one text 3 times"):
        run_generate(arguments_of("--checkpoint", run_folder, "--num-samples", 3, "--temperature", 0))
