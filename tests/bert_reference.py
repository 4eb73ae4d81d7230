"""A serial BERT in float64, written from the papers and from nothing in mjax: the oracle of the parallel tests.

As `reference` is for GPT: one device, no sharding, no scan; weights are a flat {name: array} of whole matrices.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

compiled = partial(jax.jit, static_argnums=1)  # one operation at a time takes longer


def _norm(x, scale, bias, epsilon):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon) * scale + bias


def _gelu(x, activation):
    if activation == "gelu_erf":
        return 0.5 * x * (1 + jax.scipy.special.erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def encoded(weights, model, batch, masks=None):
    """What the heads read, [b, s, h]."""

    def drop(x, rate, place):
        return x if masks is None else x * masks[place] / (1 - rate)

    def norm(x, name, w=weights):
        return _norm(x, w[f"{name}.scale"], w[f"{name}.bias"], model.layernorm_epsilon)

    pre = model.layernorm == "pre"
    identity = lambda x, *_: x  # noqa: E731
    before, after = (norm, identity) if pre else (identity, norm)  # figures 7b and 7a

    x = (
        weights["embedding.table"][batch["tokens"]]
        + weights["positions"]
        + weights["token_types"][batch["token_types"]]
    )
    x = drop(after(x, "embedding_norm"), model.hidden_dropout, (0, 0))
    text = batch["documents"] == 0
    visible = (text[:, :, None] == text[:, None, :])[:, None]  # [b, 1, query, key]
    for layer in range(model.layers):
        w = {k.removeprefix("blocks."): v[layer] for k, v in weights.items() if k.startswith("blocks.")}
        y = before(x, "attention_norm", w)
        q, k, v = (
            jnp.einsum("bsh,hnd->bnsd", y, w["attention.qkv.kernel"][:, i]) + w["attention.qkv.bias"][i][:, None]
            for i in range(3)
        )
        products = jnp.where(visible, q @ k.swapaxes(2, 3) / np.sqrt(model.head_size), -jnp.inf)
        p = jnp.exp(products - jax.scipy.special.logsumexp(products, axis=-1, keepdims=True))
        context = drop(p, model.attention_dropout, (layer + 1, 1)) @ v
        y = jnp.einsum("bnqd,ndh->bqh", context, w["attention.out.kernel"]) + w["attention.out.bias"]
        x = after(x + drop(y, model.hidden_dropout, (layer + 1, 2)), "attention_norm", w)
        y = before(x, "mlp_norm", w)
        y = _gelu(y @ w["mlp.up.kernel"] + w["mlp.up.bias"], model.activation) @ w["mlp.down.kernel"]
        y = drop(y + w["mlp.down.bias"], model.hidden_dropout, (layer + 1, 3))
        x = after(x + y, "mlp_norm", w)
    return before(x, "final_norm")


def _pooled(weights, x):
    return jnp.tanh(x[:, 0] @ weights["pooler.kernel"] + weights["pooler.bias"])


def scores(weights, model, batch, masks=None):
    """Of tokens [b, s, v], and of in order and swapped [b, 2]."""
    x = encoded(weights, model, batch, masks)
    y = x @ weights["mlm.transform.kernel"] + weights["mlm.transform.bias"]
    y = _gelu(y, model.mlm_activation or model.activation)
    y = _norm(y, weights["mlm.norm.scale"], weights["mlm.norm.bias"], model.layernorm_epsilon)
    of_tokens = y @ weights["embedding.table"].T + weights["mlm.bias"]
    of_tokens = of_tokens[..., : model.vocabulary]  # the rest is padding
    return of_tokens, _pooled(weights, x) @ weights["order.kernel"] + weights["order.bias"]


def _cross_entropy(scores, labels):
    log_probabilities = scores - jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    return -jnp.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]


@compiled
def loss(weights, model, batch, masks=None):
    """Megatron's loss, masked tokens plus order, nats; and both of them and the share of orders found, [3]."""
    of_tokens, of_order = scores(weights, model, batch, masks)
    counts = batch["loss_mask"]
    masked = (_cross_entropy(of_tokens, batch["labels"]) * counts).sum() / counts.sum()
    order = _cross_entropy(of_order, batch["sentence_order"]).mean()
    found = (of_order.argmax(-1) == batch["sentence_order"]).mean()
    return masked + order, jnp.stack([masked, order, found])


@compiled
def task_scores(weights, model, batch, masks=None):
    """Of classes or choices [b, n], or of the first and the last token of an answer [b, 2, s], -inf at padding."""
    rows = {name: array.reshape(-1, model.sequence) for name, array in batch.items() if array.ndim == 3}
    x = encoded(weights, model, rows, masks)
    if model.head == "span":
        ends = jnp.einsum("bsh,hk->bks", x, weights["head.kernel"]) + weights["head.bias"][:, None]
        return jnp.where(rows["documents"][:, None] == 0, ends, -jnp.inf)
    pooled = _pooled(weights, x)
    if masks is not None:
        pooled = pooled * masks[0, 4] / (1 - model.hidden_dropout)
    found = pooled @ weights["head.kernel"] + weights["head.bias"]
    return found.reshape(-1, model.answers)


@compiled
def task_loss(weights, model, batch, masks=None):
    """Mean cross entropy of the labels, of a span of both its ends, and the share of samples that are right, [2]."""
    found = task_scores(weights, model, batch, masks)
    if model.head == "span":
        losses = (_cross_entropy(found[:, 0], batch["start"]) + _cross_entropy(found[:, 1], batch["end"])) / 2
        right = (found[:, 0].argmax(-1) == batch["start"]) & (found[:, 1].argmax(-1) == batch["end"])
    else:
        losses, right = _cross_entropy(found, batch["label"]), found.argmax(-1) == batch["label"]
    return losses.mean(), jnp.stack([losses.mean(), right.mean()])


@compiled
def loss_and_gradients(weights, model, batch, masks=None):
    total = loss if model.kind == "bert" else task_loss
    (_, figures), gradients = jax.value_and_grad(total, has_aux=True)(weights, model, batch, masks)
    return figures, gradients
