"""Adapters compared with peft's: folders in both directions, merged weights, and twenty steps of AdamW on four
meshes."""

import copy
import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mjax.commands import cli
from mjax.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig, read_config
from mjax.errors import UsageError
from mjax.generation.inference import open_run
from mjax.interop import lora
from mjax.interop.convert import export_family
from mjax.interop.lora import adapter_modules
from mjax.parallel.mesh import make_mesh
from mjax.parallel.weights import trainable_only
from mjax.step.step import build_program
from tests.against_reference import in_layer_order
from tests.small import named

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-ci")
from tests.parity.outputs import assert_scores, batch_of  # noqa: E402
from tests.parity.test_llama_transformers import FAMILIES, SMALL, outputs_of  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = EVERY[:4]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES = {  # the family, what has adapters, and settings of peft
    "llama": ("llama 2", EVERY, {}),
    "qwen, some": ("qwen 3", ["q_proj", "v_proj", "down_proj"], {"use_rslora": True, "lora_alpha": 7}),
    "mixture": ("olmoe", ATTENTION, {"init_lora_weights": False}),
    "deepseek": ("deepseek 3", LATENT, {"init_lora_weights": False}),
}
MESHES = [{}, {"model": 2, "sequence_parallel": True}, {"pipe": 2}, {"data": 2, "model": 2, "zero": 3}]


@pytest.fixture(scope="module", params=CASES)
def both(request, tmp_path_factory):
    """A folder with a base run and an adapter run, and peft's model of both."""
    folder = tmp_path_factory.mktemp("lora")
    family, targets, settings = CASES[request.param]
    kind, fields, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | fields)
    base = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    base.save_pretrained(folder / "base")
    how = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0} | settings
    peer = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **how)
    )
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            if ".lora_B." in name and not weight.any():  # peft's default, with which an adapter adds nothing
                weight.uniform_(-0.5, 0.5)
    peer.save_pretrained(folder / "adapter")
    for command in (
        ["from-hf", str(folder / "base"), str(folder / "q")],
        ["from-hf", str(folder / "adapter"), str(folder / "lora"), "--base", str(folder / "q")],
    ):
        assert cli.main(["convert", *command]) == 0
    return folder, base, peer.eval()


def adapters_of(peer):
    return {name: p.detach().numpy() for name, p in peer.named_parameters() if ".lora_" in name}


def test_both_say_the_same_and_export_what_they_were(both):
    folder, base, peer = both
    batch = batch_of(read_config(folder / "lora" / "config.json").model)
    assert_scores(folder / "lora", peer, batch)
    for flags in (["out", "--adapter"], ["merged", "--merged"]):
        assert cli.main(["convert", "to-hf", str(folder / "lora"), str(folder / flags[0]), flags[1]]) == 0
    alpha = json.loads((folder / "out" / "adapter_config.json").read_text())["lora_alpha"]
    assert isinstance(alpha, int), "as vLLM requires"
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "out").eval()
    ids = torch.tensor(batch["tokens"].astype(np.int64))
    with torch.no_grad():
        expected = peer(ids).logits
        torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=0)
        merged = type(base).from_pretrained(folder / "merged")
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
        whole = dict(copy.deepcopy(peer).merge_and_unload().named_parameters())
        for name, weight in merged.named_parameters():
            torch.testing.assert_close(weight, whole[name], rtol=1e-6, atol=1e-7)
        assert (merged(ids).logits - base(ids).logits).abs().max() > 1e-2
    if type(base).__name__ == "LlamaForCausalLM":
        assert cli.main(["convert", "to-megatron", str(folder / "lora"), str(folder / "meg"), "--merged"]) == 0
        for command in (["from-megatron", "meg", "again"], ["to-hf", "again", "same"]):
            assert cli.main(["convert", command[0], *(str(folder / name) for name in command[1:])]) == 0
        files = (folder / name / "model.safetensors" for name in ("same", "merged"))
        assert next(files).read_bytes() == next(files).read_bytes()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_twenty_steps_follow_peft(both, mesh):
    folder, _, peer = both
    peer = copy.deepcopy(peer)
    config = replace(
        read_config(folder / "lora" / "config.json"),
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="constant", weight_decay=0.1, clip_norm=1.0),
        train=TrainConfig(steps=100, global_batch=4, micro_batch=2),
    )
    config = replace(config, model=replace(config.model, attention="xla"))
    target = build_program(config, make_mesh(config.mesh)).abstract_state.model
    weights, last = open_run(folder / "lora").weights_for(target), []
    batches = [batch_of(config.model, seed) for seed in range(4)]
    loss = lambda batch: outputs_of(peer, batch)[1]  # noqa: E731
    ours, theirs = losses_of_both(config, weights, peer, loss, batches, last=last)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert theirs[-1] < theirs[0] - 0.02, "the trajectory went nowhere"
    found, theirs = in_layer_order(trainable_only(last[0].model), config), adapters_of(peer)
    modules = adapter_modules(export_family(config.model.without_lora()), config.model)
    assert len(theirs) == 2 * len(modules)
    for name, module in modules.items():
        for ours, end in (
            (module.a(found[f"{module.path}.adapter.a"]), "A"),
            (module.b(found[f"{module.path}.adapter.b"]), "B"),
        ):
            other = theirs[f"base_model.model.{name}.lora_{end}.default.weight"]
            # AdamW turns roundings of small gradients into steps.
            np.testing.assert_allclose(ours, other, rtol=1e-5, atol=5e-5, err_msg=f"{name} {end}")


def test_an_adapter_trains_on_here(both, capsys):
    """A new run from it has new moments and the same base."""
    folder, *_ = both
    flags = ("--data.mock", "--train.steps", "2", "--train.global-batch", "16", "--train.micro-batch", "1")
    config = ["--config", str(folder / "lora" / "config.json"), "--init", str(folder / "lora"), "--runs", str(folder)]
    name = ("--name", "more", "--mesh.data", "16", "--train.eval-interval", "0")
    assert cli.main(["train", *config, *name, *flags, "--log.sample-tokens", "0"]) == 0
    assert "trainable (" in capsys.readouterr().out
    assert (folder / "more" / "base.json").read_text() == (folder / "lora" / "base.json").read_text()
    before, after = (named(open_run(folder / name).weights) for name in ("lora", "more"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if ".adapter." in name}


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(both, tmp_path):
    """The folder of an adapter to break, and the run of its base."""
    folder, *_ = both
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((folder / "adapter" / name).read_bytes())
    return tmp_path, folder / "q"


def refused(folder, capsys, *flags):
    """The sentence with which an import is refused."""
    assert cli.main(["convert", "from-hf", str(folder), str(folder / "out"), *flags]) == 2
    assert not (folder / "out").exists()
    return capsys.readouterr().err


def test_foreign_adapters_are_refused_in_a_sentence(copied, capsys, tmp_path_factory):
    folder, base = copied
    assert "holds adapters; add --base RUN" in refused(folder, capsys)
    assert "holds adapters itself" in refused(folder, capsys, "--base", str(base.parent / "lora"))
    values = json.loads((folder / "adapter_config.json").read_text())
    changes = {"use_dora": True, "peft_type": "IA3", "bias": "all", "rank_pattern": {"q_proj": 8}, "r": 0}
    changes |= {"init_lora_weights": "pissa_niter_4", "alora_invocation_tokens": [7], "unknown": 0.5}
    for name, value in changes.items():
        (folder / "adapter_config.json").write_text(json.dumps({**values, name: value}))
        said = refused(folder, capsys, "--base", str(base))
        assert f"{name} is {value!r}" in said, said
    (folder / "adapter_config.json").write_text(json.dumps({**values, "r": 5}))
    assert "and the base asks for" in refused(folder, capsys, "--base", str(base))
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "adapter_model.safetensors")
    name, array = next(iter(tensors.items()))
    others = {key: value for key, value in tensors.items() if key != name}
    for more, words in (
        ({}, "mjax has adapters in all layers or in none"),
        ({name: array, name.replace("layers.0.", "layers.7."): array}, "give --base the run of the model"),
        ({name: array, "base_model.model.lm_head.weight": array}, "is not part of LoRA's adapters"),
    ):
        save_file(others | more, folder / "adapter_model.safetensors")
        assert words in refused(folder, capsys, "--base", str(base))


def test_every_setting_of_peft_is_read_harmless_or_refused(copied):
    folder, base = copied
    model, values = read_config(base / "config.json").model, json.loads((folder / "adapter_config.json").read_text())
    others = {"peft_type": "IA3", "bias": "all", "init_lora_weights": "pissa"}
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)} - lora.READ_SETTINGS - lora.IGNORED_SETTINGS
    assert {"alora_invocation_tokens", "corda_config", "rank_pattern", *others} < names <= values.keys()
    assert lora.load_adapters(folder, model, export_family(model))
    for name in names:
        (folder / "adapter_config.json").write_text(json.dumps(values | {name: others.get(name, True)}))
        with pytest.raises(UsageError, match=f": {name} is "):
            lora.load_adapters(folder, model, export_family(model))


def test_fused_families_are_merged_only(tmp_path, capsys):
    """GPT-2 has queries, keys and values in one matrix: peft has one adapter for them."""
    kind, fields, _ = FAMILIES["gpt 2"]
    torch.manual_seed(0)
    base = getattr(transformers, f"{kind}LMHeadModel")(getattr(transformers, f"{kind}Config")(**fields))
    base.save_pretrained(tmp_path / "base")
    assert cli.main(["convert", "from-hf", str(tmp_path / "base"), str(tmp_path / "q")]) == 0
    config = ["--config", str(tmp_path / "q" / "config.json"), "--init", str(tmp_path / "q"), "--runs", str(tmp_path)]
    length = ("--train.steps", "3", "--train.global-batch", "16", "--train.micro-batch", "1", "--mesh.data", "16")
    flags = ("--data.mock", "--train.eval-interval", "0", "--log.sample-tokens", "0", "--optimizer.warmup-steps", "0")
    assert cli.main(["train", *config, "--name", "lora", "--lora.rank", "2", *length, *flags]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "lora"), str(tmp_path / "out"), "--adapter"]) == 2
    assert "q and k and v in one matrix" in capsys.readouterr().err
    assert cli.main(["convert", "to-hf", str(tmp_path / "lora"), str(tmp_path / "out"), "--merged"]) == 0
    batch = batch_of(read_config(tmp_path / "lora" / "config.json").model)
    assert_scores(tmp_path / "lora", type(base).from_pretrained(tmp_path / "out").eval(), batch)
