"""Outputs of models of `transformers` for our batches, and their weights and gradients in our trees."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from mjax.commands import cli
from mjax.interop.weights import tensor_layouts, weights_by_name
from mjax.parallel.weights import leaf_name
from tests.interop.folders import read_folder
from tests.interop.whole_weights import assert_same
from tests.parity.peers import scores_of


def batch_of(model, seed=0):
    """Four sequences of random tokens for a GPT, with their labels."""
    rows = np.random.default_rng(seed).integers(0, model.vocabulary, (4, model.sequence + 1))
    return {"tokens": rows[:, :-1].astype(np.int32), "labels": rows[:, 1:].astype(np.int32)}


def logits_of(peer, batch):
    """Scores of a GPT, [b, s, v]."""
    return peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits


def outputs_of_pretraining(peer, batch):
    """Return both scores and the loss of a …ForPreTraining of BERT for a batch of pairs."""
    tensors = {name: torch.tensor(array.astype(np.int64)) for name, array in batch.items()}
    return peer(
        input_ids=tensors["tokens"],
        attention_mask=1 - tensors["documents"],
        token_type_ids=tensors["token_types"],
        labels=torch.where(tensors["loss_mask"] == 1, tensors["labels"], -100),
        next_sentence_label=tensors["sentence_order"],
    )


def random_bert(model, ending, **settings):
    """The class of `transformers` that has a BERT's LayerNorms and whose name has this ending, with random weights."""
    torch.manual_seed(0)
    kind = "Bert" if model.layernorm == "post" else "MegatronBert"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocabulary,
        max_position_embeddings=model.sequence,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.mlp_width,
        hidden_act="gelu_new" if model.activation == "gelu_tanh" else "gelu",
        layer_norm_eps=model.layernorm_epsilon,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        pad_token_id=None,  # torch would give that row no gradient
        **settings,
    )
    return with_noise(getattr(transformers, f"{kind}{ending}")(config))


def with_noise(peer):
    """The peer with noise on every weight: biases are 0 and LayerNorms 1 at first, a mistake could hide behind them."""
    biases = (buffer for name, buffer in peer.named_buffers() if name.endswith("correction_bias"))
    with torch.no_grad():
        for weight in (*peer.parameters(), *biases):
            weight += 0.05 * torch.randn_like(weight)
    return peer


# --- Weights and gradients --------------------------------------------------------------------------------------------


def in_float64(weights):
    return jax.tree.map(lambda weight: jnp.asarray(weight, jnp.float64), jax.device_get(weights))


def in_tree(tensors, target, family, model):
    """Tensors of a peer, by its names, in the tree of `target`."""
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in weights_by_name(target).items()}
    for name, place in tensor_layouts(family, model).items():
        arrays[place.weight][place.index] = place.from_file(tensors[name])
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.asarray(arrays[leaf_name(path)]), target)


def weights_of(peer, target, family, model):
    tensors = {name: tensor.detach().numpy() for name, tensor in peer.named_parameters()}
    return in_tree(tensors, target, family, model)


def gradients_of(peer, target, family, model):
    """A router's bias is a buffer of the peer, without a gradient."""
    gradients = {name: np.zeros(tensor.shape) for name, tensor in peer.named_buffers()}
    gradients |= {name: tensor.grad.numpy() for name, tensor in peer.named_parameters()}
    return in_tree(gradients, target, family, model)


def assert_gradients(found, expected, atol=1e-12):
    """Two trees of float64; some biases have no effect, and all other gradients are not 0."""
    expected = weights_by_name(expected)
    for name, gradient in weights_by_name(found).items():
        nothing = name in ("head.bias", "final_norm.bias") or name.endswith("router.bias")
        assert nothing or np.abs(expected[name]).max() > 1e-9, name
        np.testing.assert_allclose(np.asarray(gradient), expected[name], rtol=0, atol=atol, err_msg=name)


def exported(peer, folder):
    """The peer in float64 as its class opens the export of the run in `folder`; no key missing, every tensor the same
    as in `hf`."""
    assert cli.main(["convert", "to-hf", str(folder / "run"), str(folder / "out"), "--shard-size", "20KB"]) == 0
    again, report = type(peer).from_pretrained(folder / "out", output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), report
    assert_same(read_folder(folder / "out"), read_folder(folder / "hf"))
    again.config._experts_implementation = peer.config._experts_implementation  # by default kernels without float64
    return again.eval().double()


def assert_scores(run, peer, batch):
    """Check that a run scores as its peer does; text only, because padding has no reader."""
    with torch.no_grad():
        if "token_types" in batch:
            expected = outputs_of_pretraining(peer, batch)
            _, (found, order) = scores_of(run, *(batch[name] for name in ("tokens", "token_types", "documents")))
            np.testing.assert_allclose(order, expected.seq_relationship_logits.numpy(), atol=2e-5, rtol=1e-5)
            expected, text = expected.prediction_logits.numpy(), batch["documents"] == 0
        else:
            _, found = scores_of(run, batch["tokens"])
            expected, text = logits_of(peer, batch).numpy(), slice(None)
    vocabulary = peer.config.vocab_size
    np.testing.assert_allclose(found[text][..., :vocabulary], expected[text], atol=2e-5, rtol=1e-5)
