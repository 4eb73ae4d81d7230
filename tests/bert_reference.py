"""A serial BERT in float64, written from the papers and from nothing in mjax: the oracle of the parallel tests.

As `reference` is for GPT: one device, no sharding, no scan; weights are a flat {name: array} of whole matrices.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import QUICKLY


def _norm(x, scale, bias, epsilon):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon) * scale + bias


def _gelu(x, activation):
    if activation == "gelu_erf":
        return 0.5 * x * (1 + jax.scipy.special.erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def scores(weights, model, batch, masks=None):
    """Of tokens [b, s, v], and of in order and swapped [b, 2]."""

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
    x = before(x, "final_norm")

    y = _gelu(x @ weights["mlm.transform.kernel"] + weights["mlm.transform.bias"], model.activation)
    of_tokens = norm(y, "mlm.norm") @ weights["embedding.table"].T + weights["mlm.bias"]
    of_tokens = of_tokens[..., : model.vocabulary]  # the rest is padding
    pooled = jnp.tanh(x[:, 0] @ weights["pooler.kernel"] + weights["pooler.bias"])
    return of_tokens, pooled @ weights["order.kernel"] + weights["order.bias"]


def _cross_entropy(scores, labels):
    log_probabilities = scores - jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    return -jnp.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]


def loss(weights, model, batch, masks=None):
    """Megatron's loss, masked tokens plus order, nats; and both of them and the share of orders found, [3]."""
    of_tokens, of_order = scores(weights, model, batch, masks)
    counts = batch["loss_mask"]
    masked = (_cross_entropy(of_tokens, batch["labels"]) * counts).sum() / counts.sum()
    order = _cross_entropy(of_order, batch["sentence_order"]).mean()
    found = (of_order.argmax(-1) == batch["sentence_order"]).mean()
    return masked + order, jnp.stack([masked, order, found])


def _loss_and_gradients(weights, model, batch, masks=None):
    (_, figures), gradients = jax.value_and_grad(loss, has_aux=True)(weights, model, batch, masks)
    return figures, gradients


loss_and_gradients = jax.jit(_loss_and_gradients, static_argnums=1, compiler_options=QUICKLY)
