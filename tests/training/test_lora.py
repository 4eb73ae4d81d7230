"""Runs that train adapters: what is stored, dropout on every mesh, checkpoints with a base that is named by digest."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import mjax
from mjax.checkpoint import base as bases
from mjax.checkpoint.arrays import leaves_by_path as by_name
from mjax.checkpoint.folders import checkpoint_steps, read_manifest
from mjax.commands import cli
from mjax.config import LlamaConfig, MeshConfig, OptimizerConfig, PrecisionConfig
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.generation.inference import open_run
from mjax.interop.convert import write_checkpoint
from mjax.models.build import count_parameters
from mjax.models.protocol import ForwardContext
from mjax.parallel import random
from mjax.parallel.mesh import abstract_mesh, make_mesh
from mjax.planner.layer import model_flops
from mjax.planner.memory import device_weights, predict_memory
from mjax.run.continuing import choose_origin
from mjax.step.layout import initial_weights
from mjax.step.step import build_program
from tests.small import batch_of, named, small_config
from tests.tiny_config import config as tiny
from tests.training.test_trainer import losses

LLAMA = LlamaConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, sequence=16, vocabulary=257, feed_forward=48, attention="xla",
)  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 16.0}
CONFIG = replace(
    tiny,
    model=LLAMA,
    optimizer=OptimizerConfig(learning_rate=3e-2, schedule="constant", clip_norm=0.0),
    train=replace(tiny.train, steps=6, eval_interval=0, micro_batch=1),
    checkpoint=replace(tiny.checkpoint, interval=3, keep_last=9),
)
ADAPTED = replace(CONFIG, model=replace(LLAMA, **LORA))
pytestmark = pytest.mark.usefixtures("quick_runs", "fewer_devices")


# --- What is stored ---------------------------------------------------------------------------------------------------


def test_frozen_weights_are_narrow_and_have_no_moments():
    config = replace(ADAPTED, precision=PrecisionConfig(compute="bf16"))
    program = build_program(config, abstract_mesh(config.mesh))
    state = program.abstract_state
    own = {name for name in by_name(state.model) if ".adapter." in name}
    assert len(own) == 10
    for name, leaf in by_name(state.model).items():
        assert leaf.dtype == ("float32" if name in own else "bfloat16"), name
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sorted(leaf.shape for leaf in moments) == sorted(
        2 * [leaf.shape for name, leaf in by_name(state.model).items() if name in own]
    )
    assert {name.partition(" of layer ")[0] for name in program.gradient_names} == own


def test_initial_a_is_uniform_as_pefts_and_never_repeats():
    """Up to 1 / √inputs: Kaiming's with a = √5. No two of a layer, of its parts or of other layers are equal."""
    weights, rows, matrices = named(initial_weights(ADAPTED)), {"out": 32, "down": 48}, []
    for name in [name for name in weights if name.endswith(".adapter.a")]:
        layer, a = name.split(".")[-3], weights[name]
        for matrix in a.reshape(2, -1, 4) if layer in rows else a.swapaxes(1, 2).reshape(-1, 32, 4):
            bound = rows.get(layer, 32) ** -0.5
            assert 0.9 * bound < np.abs(matrix).max() <= bound, name
            assert abs(matrix.mean()) < 0.2 * bound
            matrices.append(matrix[:32])
        assert not weights[name.removesuffix("a") + "b"].any()
    assert len(np.unique(np.stack(matrices), axis=0)) == len(matrices) == 2 * 7


def test_plan_and_flops_count_what_is_trained():
    """A frozen weight costs the gradient of its input and no other; the first layer's too, although it has no use."""
    mesh = MeshConfig(data=4, model=2, zero=3)
    whole, own = (device_weights(ADAPTED.model, mesh, trained=trained).stored for trained in (False, True))
    base = device_weights(CONFIG.model, mesh).stored
    assert whole == base + own
    adapters = count_parameters(ADAPTED.model) - count_parameters(CONFIG.model)
    assert adapters == count_parameters(ADAPTED.model, trained=True)
    # q, k, v, out, gate, up and down: r (inputs + outputs) of each, in two layers
    assert adapters == 2 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 48) + (48 + 32))
    tokens = CONFIG.train.global_batch * LLAMA.sequence
    kernels = 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48) + LLAMA.padded_vocabulary * 32
    expected = model_flops(CONFIG) - 2 * tokens * kernels + 3 * 2 * tokens * adapters
    assert model_flops(ADAPTED) == pytest.approx(expected, rel=1e-12)
    wide, narrow = (predict_memory(replace(config, precision=PrecisionConfig())) for config in (CONFIG, ADAPTED))
    assert narrow.optimizer == 8 * adapters
    assert wide.optimizer == 8 * count_parameters(CONFIG.model)


# --- Dropout ----------------------------------------------------------------------------------------------------------

MESHES = [{"model": 2, "context": 2, "sequence_parallel": True}, {"pipe": 2, "data": 2, "model": 2, "zero": 3}]


def losses_with_dropout(rate, data=1, model=1, **mesh):
    changes = {"kind": "llama", "kv_heads": 4, "feed_forward": 24, "lora_rank": 4, "lora_dropout": rate}
    with jax.enable_x64(True):
        config = small_config(data, model, 1, compute="fp64", dropout=0.0, mesh=mesh, **changes)
        program = build_program(config, make_mesh(config.mesh))
        state, found = program.initialize(), []
        for step in range(3):
            state, metrics = program.train_step(state, program.put_on_devices(batch_of(config, step)))
            found.append([float(metrics.loss), float(metrics.grad_norm)])
        return np.array(found)


def test_dropout_of_adapters_is_the_same_on_every_mesh():
    expected = losses_with_dropout(0.5)
    for mesh in MESHES:
        np.testing.assert_allclose(losses_with_dropout(0.5, **mesh), expected, rtol=1e-12, err_msg=str(mesh))
    without = losses_with_dropout(0.0)
    assert expected[0, 0] == without[0, 0]  # B is zero at first
    assert np.abs(expected[1:] - without[1:]).min() > 1e-5


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_each_site_of_a_layer_has_its_masks(kind, monkeypatch):
    sites, key_of = [], ForwardContext.layer_key
    monkeypatch.setattr(ForwardContext, "layer_key", lambda self, site: sites.append(site) or key_of(self, site))
    config = small_config(kind=kind, lora_rank=2, lora_dropout=0.1)
    program = build_program(config, abstract_mesh(config.mesh))
    jax.eval_shape(program.train_step, program.abstract_state, program.abstract_batch)
    of_adapters = [random.LORA_QKV, random.LORA_OUT, random.LORA_UP, random.LORA_DOWN]
    of_layers = [random.EMBEDDING, random.ATTENTION, random.ATTENTION_OUTPUT, random.MLP_OUTPUT]
    assert sorted(sites) == sorted(of_layers + of_adapters)
    assert len(set(sites)) == len(sites)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory, quick_runs):
    """A folder with the run of a base, and one of adapters on it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mjax.run.loop.check_devices", lambda *_: None)
        assert mjax.Trainer(replace(CONFIG, train=replace(CONFIG.train, steps=2)), folder / "q", show=False).train()
        assert mjax.Trainer(ADAPTED, folder / "lora", init=folder / "q", show=False).train().step == 6
    return folder


@pytest.fixture
def moved(runs, tmp_path):
    """The same runs in another folder; the first place of the base is gone for them."""
    for name in ("q", "lora"):
        shutil.copytree(runs / name, tmp_path / name)
    base = json.loads((tmp_path / "lora" / "base.json").read_text())
    (tmp_path / "lora" / "base.json").write_text(json.dumps(base | {"run": "/gone/q"}))
    return tmp_path


def test_checkpoints_hold_the_adapters_and_name_their_base(runs):
    arrays = read_manifest(runs / "lora" / "checkpoints" / "6")["arrays"]
    weights = [name for name in arrays if name.startswith("model.")]
    assert len(weights) == 10
    assert all(".adapter." in name for name in weights)
    base = json.loads((runs / "lora" / "base.json").read_text())
    assert (base["run"], base["step"]) == (str(runs / "q"), 2)
    before, after = named(open_run(runs / "q").weights), named(open_run(runs / "lora").weights)
    assert all(np.array_equal(after[name], weight) for name, weight in before.items())
    assert all(np.any(weight) for name, weight in after.items() if ".adapter." in name)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, model=2, zero=3), MeshConfig(pipe=2, data=2)])
def test_a_run_goes_on_from_its_checkpoint_on_any_mesh(runs, moved, mesh):
    shutil.rmtree(moved / "lora" / "checkpoints" / "6")  # as if it had been killed
    config = replace(ADAPTED, mesh=mesh)
    assert mjax.Trainer(config, moved / "lora", show=False).train().step == 6
    if mesh == MeshConfig():
        assert losses(moved / "lora") == losses(runs / "lora")
    else:
        np.testing.assert_allclose(losses(moved / "lora"), losses(runs / "lora"), rtol=1e-5)


def digest_of(weights):
    return bases._digest({name: np.asarray(bases._digest_sums(array)) for name, array in by_name(weights).items()})


def test_digest_is_of_names_and_numbers_alone(runs, tmp_path):
    """Not of a mesh, nor of the files; and a change of one bit is seen, also an exchange of two numbers."""
    weights = named(open_run(runs / "q").weights)
    narrow = {name: weight.astype("bfloat16") for name, weight in weights.items()}
    assert digest_of(narrow) != digest_of(narrow | {"final_norm.scale": narrow["final_norm.scale"] * 2})
    digest = json.loads((runs / "lora" / "base.json").read_text())["digest"]
    assert digest_of(weights) == digest
    assert digest_of(dict(reversed(weights.items()))) == digest
    assert digest_of({name.replace("norm.", "norms."): weight for name, weight in weights.items()}) != digest
    assert digest_of(open_run(runs / "q", mesh=MeshConfig(pipe=2, data=2, model=2, zero=1)).weights) == digest
    assert bases.digest_in_blocks(runs / "q" / "checkpoints" / "2") == digest
    target = open_run(runs / "q").weights
    write_checkpoint(tmp_path, {"model": target}, lambda name, first, end: weights[name][first:end])
    assert bases.digest_in_blocks(tmp_path / "0") == digest
    for change in (lambda w: np.nextafter(w, np.float32(9)), lambda w: w[::-1].copy()):
        assert digest_of(weights | {"final_norm.scale": change(weights["final_norm.scale"])}) != digest


def test_opened_base_is_not_rounded_to_bf16(runs, moved):
    (moved / "lora" / "config.json").write_text(
        (runs / "lora" / "config.json").read_text().replace('"compute": "fp32"', '"compute": "bf16"')
    )
    opened, ids = open_run(moved / "lora"), [[1, 2, 3]]
    assert opened.config.precision.compute == "bf16"
    exact, narrow = mjax.logits(runs / "lora", ids)[0], mjax.logits(opened, ids)[0]
    for run in (opened, moved / "lora"):
        np.testing.assert_array_equal(mjax.logits(run, ids, compute="fp32")[0], exact)
    assert 1e-3 < np.abs(exact - narrow).max() < 0.1


def test_a_base_that_is_gone_or_another_is_refused(moved, capsys):
    generate = ["generate", "--run", str(moved / "lora"), "--tokenizer", "bytes", "--prompt", "a", "--tokens", "2"]
    assert cli.main(generate) == 0  # it is next to the run
    base = moved / "lora" / "base.json"
    known = json.loads(base.read_text())
    base.write_text(json.dumps(known | {"digest": "0" * 16}))
    assert cli.main(generate) == 2
    said = capsys.readouterr().err
    assert "has adapters of weights with the digest 0000000000000000" in said, said
    (moved / "q").rename(moved / "elsewhere")
    assert cli.main(generate) == 2
    assert "adapters of /gone/q, which is gone; put that run back, or write its path into" in capsys.readouterr().err
    base.write_text(json.dumps(known | {"run": str(moved / "elsewhere")}))
    assert cli.main(generate) == 0
    base.unlink()
    assert cli.main(generate) == 2
    assert "start one with --init RUN" in capsys.readouterr().err


def test_a_base_is_not_removed_before_its_adapters(moved, capsys):
    (moved / "lora" / "samples.jsonl").touch()  # of --log.sample-prompts
    assert cli.main(["runs", "remove", "q", "--runs", str(moved), "--yes"]) == 2
    assert "the adapters of lora belong to; remove that run too: mjax runs remove q lora" in capsys.readouterr().err
    assert cli.main(["runs", "remove", "q", "lora", "--runs", str(moved), "--yes"]) == 0
    assert not list(moved.glob("*/config.json"))


@pytest.mark.ci
def test_bf16_runs_save_on_meshes_with_copies(runs, tmp_path):
    """Frozen weights in 16 bits have copies on every such mesh; with 3 replicas ZeRO cannot split most of them."""
    meshes = {"data": 2}, {"context": 2}, {"data": 4, "replicate": 2, "zero": 1}, {"data": 3, "zero": 3}
    for number, mesh in enumerate(meshes):
        config = replace(ADAPTED, mesh=MeshConfig(**mesh), precision=PrecisionConfig(compute="bf16"))
        config = replace(config, train=replace(config.train, steps=2, global_batch=12))
        folder = tmp_path / str(number)
        assert mjax.Trainer(config, folder, init=runs / "q", show=False).train().step == 2, mesh
        assert checkpoint_steps(folder) == [2], mesh
        np.testing.assert_allclose(losses(folder), losses(tmp_path / "0"), rtol=2e-3, err_msg=str(mesh))


# --- Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": 8.0}, "--lora.alpha 8.0 has no effect without adapters; add --lora.rank"),
        ({"lora_rank": 4, "compute": "fp8"}, "is not supported with --precision.compute fp8; type .* bf16"),
        ({"lora_rank": 4, "optimizer": "muon"}, "--optimizer.name muon.* use adamw"),
        ({"lora_rank": 4, "kind": "bert"}, "is not supported for a BERT"),
    ],
)
def test_settings_that_do_not_go_together(changes, words):
    config = small_config(compute=changes.pop("compute", "fp32"), **({"kind": changes.pop("kind", "gpt")}))
    config = replace(config, optimizer=OptimizerConfig(name=changes.pop("optimizer", "adamw")))
    with pytest.raises(UsageError, match=words):
        validate(replace(config, model=replace(config.model, **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": 17}, r"--lora.rank 17 is above the maximum for 32 × 16 matrices; use at most 16"),
        (
            {"lora_rank": 2, "lora_targets": ("q,v",)},
            "--lora.targets q,v is not a layer of a Llama; use down gate k out q up v",
        ),
    ],
)
def test_adapters_that_do_not_fit_the_model(changes, words):
    with pytest.raises(UsageError, match=words):
        count_parameters(replace(LLAMA, **changes))


def test_origins_that_do_not_fit(runs, tmp_path, capsys):
    new = tmp_path / "new"
    with pytest.raises(
        UsageError, match=r"holds adapters, and this run trains all .* type --lora.rank 4 --lora.alpha 16"
    ):
        choose_origin(new, CONFIG, runs / "lora")
    with pytest.raises(UsageError, match=r"\(model\.lora_rank 4, here 2\); type --lora\.rank 4"):
        choose_origin(new, replace(ADAPTED, model=replace(ADAPTED.model, lora_rank=2)), runs / "lora")
    assert choose_origin(new, ADAPTED, runs / "lora").changed == {}
    assert choose_origin(new, ADAPTED, runs / "q").changed == {}
    alone = ["train", "--config", "gpt_demo", "--runs", str(tmp_path), "--lora.rank", "4"]
    assert cli.main([*alone, "--data.path", "none"]) == 2
    assert "adapts a model: add --init RUN" in capsys.readouterr().err
