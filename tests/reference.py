"""A serial GPT in float64, written from the papers and from nothing in mjax: the oracle of the parallel tests.

One device, no sharding, no scan, no recomputation; weights are a flat {name: array} of whole matrices. Dropout masks
are computed here a second time, with NumPy integers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

M32 = np.uint64(0xFFFFFFFF)


def _mix(x):
    x = np.asarray(x, np.uint64) & M32
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)) & M32
    return x ^ (x >> np.uint64(16))


def _fold(words, number):
    step = np.array([number, (number + 0x85EBCA6B) & 0xFFFFFFFF], np.uint64)
    return _mix(_mix(words + step) ^ words[::-1])


def _step_words(seed, step):
    return _fold(_mix(np.array([seed, seed ^ 0x9E3779B9], np.uint64)), step)


def _keep(words, rate, shape):
    """The mask of an array whose dims are (sample, *rows, column)."""
    sample, *rows, columns = (np.arange(size, dtype=np.uint64) for size in shape)
    a, b = (sample + words[0]) & M32, sample ^ words[1]
    for row in rows:
        a, b = _mix(a)[..., None] + row & M32, _mix(b)[..., None] ^ row
    a, b = _mix(a)[..., None], _mix(b)[..., None]
    return _mix(_mix(columns + a) ^ b) < round((1 - rate) * 2**32)


@functools.cache
def dropout_masks(model, b, seed, step):
    """Every mask of a step over `b` sequences, by (layer, site); layer 0 is the embedding and the head of a task."""
    s = model.sequence
    words = _step_words(seed, step)
    hidden, scores = (b, s, model.hidden), (b, model.heads, s, s)
    masks = {(0, 0): _keep(_fold(_fold(words, 0), 0), model.hidden_dropout, hidden)}
    for layer in range(1, model.layers + 1):
        at = _fold(words, layer)
        masks[layer, 1] = _keep(_fold(at, 1), model.attention_dropout, scores)
        masks[layer, 2] = _keep(_fold(at, 2), model.hidden_dropout, hidden)
        masks[layer, 3] = _keep(_fold(at, 3), model.hidden_dropout, hidden)
    if model.kind == "bert_task":
        masks[0, 4] = _keep(_fold(_fold(words, 0), 4), model.hidden_dropout, (b, model.hidden))
    return masks


def _norm(x, weights, name, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weights[f"{name}.scale"] + weights[f"{name}.bias"]


def _alibi_slopes(heads):
    """As the authors' code computes them (arXiv 2108.12409, footnote 8), by recursion."""
    lower = 2 ** int(np.floor(np.log2(heads)))
    if heads == lower:
        start = 2 ** -(2 ** -(np.log2(heads) - 3))
        return [start * start**i for i in range(heads)]
    return _alibi_slopes(lower) + _alibi_slopes(2 * lower)[::2][: heads - lower]


def logits(weights, model, tokens, masks=None, positions=None, documents=None):
    def drop(x, rate, place):
        return x if masks is None else x * masks[place] / (1 - rate)

    s = tokens.shape[1]
    order = np.arange(s)
    visible = (order[:, None] >= order)[None, None]  # [1, 1, query, key]
    if model.window is not None:
        visible = visible & (order[:, None] - order < model.window)
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    x = weights["embedding.table"][tokens]
    if model.embedding_layernorm:
        x = _norm(x, weights, "embedding_norm", model.layernorm_epsilon)
    bias = 0.0
    if model.positions == "alibi":  # the form that grows with the key alone: what it adds to all keys changes nothing
        bias = np.array(_alibi_slopes(model.heads))[:, None, None] * order
    else:
        x = x + weights["positions"][order if positions is None else positions]
    x = drop(x, model.hidden_dropout, (0, 0))
    for layer in range(model.layers):
        w = {k.removeprefix("blocks."): v[layer] for k, v in weights.items() if k.startswith("blocks.")}
        y = _norm(x, w, "attention_norm", model.layernorm_epsilon)
        qkv = jnp.einsum("bsh,hcnd->cbnsd", y, w["attention.qkv.kernel"]) + w["attention.qkv.bias"][:, None, :, None]
        scores = jnp.einsum("bnqd,bnkd->bnqk", qkv[0], qkv[1]) / np.sqrt(model.head_size)
        scores = jnp.where(visible, scores + bias, -jnp.inf)
        exponentials = jnp.exp(scores - scores.max(-1, keepdims=True))
        p = exponentials / exponentials.sum(-1, keepdims=True)
        context = jnp.einsum("bnqk,bnkd->bqnd", drop(p, model.attention_dropout, (layer + 1, 1)), qkv[2])
        y = jnp.einsum("bqnd,ndh->bqh", context, w["attention.out.kernel"]) + w["attention.out.bias"]
        x = x + drop(y, model.hidden_dropout, (layer + 1, 2))
        y = _norm(x, w, "mlp_norm", model.layernorm_epsilon)
        y = y @ w["mlp.up.kernel"] + w["mlp.up.bias"]
        y = 0.5 * y * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + drop(y @ w["mlp.down.kernel"] + w["mlp.down.bias"], model.hidden_dropout, (layer + 1, 3))
    x = _norm(x, weights, "final_norm", model.layernorm_epsilon)
    return (x @ weights["embedding.table"].T)[..., : model.vocabulary]  # the rest is padding


def loss(weights, model, batch, masks=None):
    """Mean cross entropy over all labels of the batch that count, nats."""
    scores = logits(weights, model, batch["tokens"], masks, batch.get("positions"), batch.get("documents"))
    log_probabilities = scores - jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    losses = -jnp.take_along_axis(log_probabilities, batch["labels"][..., None], -1)[..., 0]
    counts = batch.get("loss_mask", np.ones(losses.shape, bool))
    return (losses * counts).sum() / counts.sum()


# Compiled quickly rather than well: it runs once or twice.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
loss_and_gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1, compiler_options=QUICKLY)
