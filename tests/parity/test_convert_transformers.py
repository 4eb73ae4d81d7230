"""`mjax convert` against `transformers` with random weights: what it opens here computes the same there, both ways."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax import cli
from mjax.config import DataConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig, read_config
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.interop import gpt2
from mjax.interop.convert import abstract_weights
from mjax.parallel.mappings import DATA, MODEL
from mjax.parallel.mesh import make_mesh
from mjax.training.checkpoint import Checkpoints
from mjax.training.step import build_program
from tests.data.vocabularies import TEXTS, gpt2_files, hf_byte_pairs
from tests.interop.folders import read_folder
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")

pytestmark = pytest.mark.parity

SHAPES = {
    "four heads": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 24, "vocab_size": 96},
    "three heads": {"n_layer": 3, "n_embd": 36, "n_head": 3, "n_positions": 17, "vocab_size": 101},
    "one head": {"n_layer": 1, "n_embd": 20, "n_head": 1, "n_positions": 9, "vocab_size": 33, "n_inner": 52},
    "exact GELU": {"n_layer": 2, "n_embd": 40, "n_head": 5, "n_positions": 16, "vocab_size": 257}
    | {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
}


def _peer(shape):
    """A model of the given shape whose biases and LayerNorm weights are random too, so that none can hide."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", initializer_range=0.1
    )
    config.bos_token_id = config.eos_token_id = None
    peer = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            if name.endswith("bias") or ".ln_" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return peer


def _imported(peer, folder, *flags):
    """The run folder made of what `save_pretrained` writes, its config set up for float32, and its weights."""
    peer.save_pretrained(folder / "hf")
    assert cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "run"), *flags]) == 0
    config = read_config(folder / "run" / "config.json")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=4, weight_decay=0.1, clip_norm=1.0
        ),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(steps=20, global_batch=4, micro_batch=2),
    )
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        return config, checkpoints.restore(abstract_weights(config), field="model")[1]


def _batch(model, seed=0):
    rows = np.random.default_rng(seed).integers(0, model.vocabulary, (4, model.sequence + 1))
    return {"tokens": rows[:, :-1].astype(np.int32), "labels": rows[:, 1:].astype(np.int32)}


def _peer_logits(peer, batch):
    return peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits


def _peer_loss(peer, batch):
    labels = torch.tensor(batch["labels"], dtype=torch.long)
    return torch.nn.functional.cross_entropy(_peer_logits(peer, batch).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", SHAPES)
def test_an_import_gives_the_logits_of_transformers(name, tmp_path):
    peer = _peer(SHAPES[name])
    config, weights = _imported(peer, tmp_path)
    batch = _batch(config.model)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_weights(config))
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=make_mesh(MeshConfig()),
        in_specs=(specs, P(DATA)),
        out_specs=P(DATA, None, MODEL),
    )
    logits = np.asarray(jax.jit(forward)(weights, batch["tokens"]))
    assert logits.shape[-1] % 128 == 0
    expected = _peer_logits(peer, batch).detach().numpy()
    np.testing.assert_allclose(logits[..., : config.model.vocabulary], expected, atol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_an_import_gives_the_loss_and_gradients_of_transformers(name, tmp_path):
    peer = _peer(SHAPES[name])
    config, weights = _imported(peer, tmp_path)
    batch = _batch(config.model)
    program, _ = gradient_program(config)
    loss, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected_loss = _peer_loss(peer, batch)
    expected_loss.backward()
    assert float(loss) == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = {name: weight.grad.numpy() for name, weight in peer.named_parameters()}
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    found = dict(gpt2.weight_arrays(gradients, config.model))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-4 * largest, err_msg=name)
    assert not np.asarray(gradients.embedding.table[...])[config.model.vocabulary :].any()


@pytest.mark.parametrize(("name", "data", "parallel"), [("four heads", 1, 1), ("three heads", 2, 3)])
def test_twenty_steps_from_an_import_follow_torch(name, data, parallel, tmp_path):
    peer = _peer(SHAPES[name])
    config, weights = _imported(peer, tmp_path, "--vocabulary-multiple", "6" if parallel == 3 else "128")
    config = replace(config, mesh=MeshConfig(data=data, model=parallel))
    program = build_program(config, make_mesh(config.mesh))
    state = program.initialize()
    placed = jax.tree.map(lambda w, s: jax.device_put(np.asarray(w), s.sharding), weights, state.model)
    state = replace(state, model=placed)

    decayed = [p for n, p in peer.named_parameters() if not n.endswith("bias") and ".ln_" not in n]
    spared = [p for n, p in peer.named_parameters() if n.endswith("bias") or ".ln_" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999))
    ours, theirs = [], []
    for step in range(20):
        batch = _batch(config.model, seed=step % 4)
        state, metrics = program.train_step(state, jax.device_put(batch, program.batch_sharding))
        ours.append(float(metrics.loss))
        # Megatron's schedule: linear from 0 over 4 steps, then a cosine down to a tenth at step 20.
        cosine = 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + np.cos(np.pi * (step - 4) / 16))
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * step / 4 if step <= 4 else cosine
        loss = _peer_loss(peer, batch)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        adamw.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


@pytest.mark.parametrize("flags", [(), ("--shard-size", "20KB")], ids=["one file", "several files"])
@pytest.mark.parametrize("name", SHAPES)
def test_transformers_opens_an_export_without_missing_or_unexpected_keys(name, flags, tmp_path):
    peer = _peer(SHAPES[name])
    config, _ = _imported(peer, tmp_path)
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), *flags]) == 0
    again, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    batch = _batch(config.model)
    with torch.no_grad():
        assert torch.equal(_peer_logits(again.eval(), batch), _peer_logits(peer, batch))
    theirs, ours = read_folder(tmp_path / "hf"), read_folder(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)


def test_an_export_in_bf16_opens_as_bf16(tmp_path):
    _imported(_peer(SHAPES["four heads"]), tmp_path)
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert opened.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["gpt2", "hf"])
def test_the_tokenizer_of_an_export_opens_and_gives_the_same_tokens(kind, tmp_path):
    peer = _peer(SHAPES["four heads"] | {"vocab_size": 400})
    peer.save_pretrained(tmp_path / "hf")
    spec = "gpt2:" + ",".join(map(str, gpt2_files(tmp_path)))
    if kind == "hf":
        hf_byte_pairs().save(str(tmp_path / "tokenizer.json"))
        spec = f"hf:{tmp_path / 'tokenizer.json'}"
    run, out = tmp_path / "run", tmp_path / "out"
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(run), "--tokenizer", spec]) == 0
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    ours, theirs = tokenizer_from_folder(run / "tokenizer"), transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == ours.eod
    assert theirs.model_max_length == 24
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


# --- pytorch_model.bin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
def test_a_pickle_is_read_on_request_and_gives_the_same_weights(legacy, tmp_path, capsys):
    peer = _peer(SHAPES["four heads"])
    peer.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    state = peer.state_dict()
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    command = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]
    assert cli.main(command) == 2
    assert "--allow-pickle" in capsys.readouterr().err
    assert cli.main([*command, "--allow-pickle"]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for name, tensor in read_folder(tmp_path / "out").items():
        assert np.array_equal(tensor, state[name].numpy()), name


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    _peer(SHAPES["four heads"]).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Trap()}, tmp_path / "hf" / "pytorch_model.bin")
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run"), "--allow-pickle"]) == 2
    assert "is not a file of tensors and nothing else" in capsys.readouterr().err
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "run").exists()
