"""A serial mixture of experts in float64, written from the papers and from nothing in mjax: the oracle of its tests.

Every expert computes every token, and a matrix of weights [tokens, experts], mostly zeros, says what counts. Nothing is
sorted, gathered or grouped. Masks of dropout are those of `reference.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import QUICKLY


def _norm(x, scale, epsilon):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def _turned(x, theta):
    """Rotary positions of x [b, n, s, d], halves of the head paired (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def _silu(x):
    return x / (1 + jnp.exp(-x))


def route(scores, model, bias=0.0):
    """The weight of every expert for every token [t, E], zero for those not chosen; which are [t, E]; and p [t, E]."""
    exponentials = jnp.exp(scores - scores.max(-1, keepdims=True))
    p = exponentials / exponentials.sum(-1, keepdims=True)
    each = p if model.router == "softmax" else 1 / (1 + jnp.exp(-scores))
    open_to = jnp.ones_like(each)
    if model.router_groups > 1:
        size = model.experts // model.router_groups
        best = jnp.sort((each + bias).reshape(-1, model.router_groups, size), -1)[..., -2:].sum(-1)
        worst_chosen = jnp.sort(best, -1)[:, -model.top_groups][:, None]
        open_to = jnp.repeat((best >= worst_chosen).astype(each.dtype), size, axis=-1)
    candidates = jnp.where(open_to > 0, each + bias, -jnp.inf)
    chosen = candidates >= jnp.sort(candidates, -1)[:, -model.experts_per_token][:, None]
    weights = each * chosen
    if model.router_normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    p = each / each.sum(-1, keepdims=True)
    return weights * model.router_scale, chosen, p


def place_of(layer, model):
    """What the names of the weights of a layer, from 0, begin with, and its index in them."""
    if model.dense_layers:
        return ("blocks.0.", layer) if layer < model.dense_layers else ("blocks.1.", layer - model.dense_layers)
    if model.expert_interval > 1:
        return f"blocks.turns.{layer % model.expert_interval}.", layer // model.expert_interval
    return "blocks.", layer


def scores(weights, model, batch):
    """Scores of the next token at every position [b, s, v]."""
    return _forward(weights, model, batch)[0]


def figures(weights, model, batch, masks=None):
    """Cross entropy, entropy of the router, balance loss of sequences and z-loss: means over the batch and layers; and
    the tokens of the busiest expert over the mean, in the layer where that is most. And the tokens of every expert [l,
    E]."""
    scores, (*means, loads) = _forward(weights, model, batch, masks)
    losses = jnp.log(jnp.exp(scores).sum(-1)) - jnp.take_along_axis(scores, batch["labels"][..., None], -1)[..., 0]
    counts = batch.get("loss_mask", np.ones(losses.shape, bool))
    return jnp.stack([(losses * counts).sum() / counts.sum(), *means]), loads


def _forward(weights, model, batch, masks=None):
    """Scores; entropy, balance loss, z-loss, the load of the busiest expert, and the tokens of all."""

    def drop(x, rate, place):
        return x if masks is None else x * masks[place] / (1 - rate)

    b, s = batch["tokens"].shape
    order = np.arange(s)
    visible = (order[:, None] >= order)[None, None]
    if batch.get("documents") is not None:
        visible = visible & (batch["documents"][:, None, :, None] == batch["documents"][:, None, None, :])
    n, k, d = model.heads, model.groups, model.head_size
    x = drop(weights["embedding.table"][batch["tokens"]], model.hidden_dropout, (0, 0))
    entropy = balance = z = busiest = 0.0
    loads, layers = [], (model.layers - model.dense_layers) // model.expert_interval
    for layer in range(model.layers):
        prefix, index = place_of(layer, model)
        w = {name.removeprefix(prefix): v[index] for name, v in weights.items() if name.startswith(prefix)}
        seen = visible
        if model.window and (model.full_attention_every is None or (layer + 1) % model.full_attention_every):
            seen = visible & (order[:, None] - order < model.window)
        y = _norm(x, w["attention_norm.scale"], model.norm_epsilon)
        if n == k:
            q, key, value = jnp.einsum("bsh,hcnd->cbnsd", y, w["attention.qkv.kernel"])
        else:
            q = jnp.einsum("bsh,hnd->bnsd", y, w["attention.query.kernel"])
            key, value = jnp.repeat(jnp.einsum("bsh,hcnd->cbnsd", y, w["attention.key_value.kernel"]), n // k, axis=2)
        scores = jnp.einsum("bnqd,bnkd->bnqk", _turned(q, model.rope_theta), _turned(key, model.rope_theta))
        scores = jnp.where(seen, scores / np.sqrt(d), -jnp.inf)
        p = jnp.exp(scores - scores.max(-1, keepdims=True))
        p = drop(p / p.sum(-1, keepdims=True), model.attention_dropout, (layer + 1, 1))
        y = jnp.einsum("bnqk,bnkd,ndh->bqh", p, value, w["attention.out.kernel"])
        x = x + drop(y, model.hidden_dropout, (layer + 1, 2))
        y = _norm(x, w["mlp_norm.scale"], model.norm_epsilon).reshape(b * s, -1)
        if "mlp.router.kernel" not in w:
            gate, other = jnp.einsum("th,hcf->ctf", y, w["mlp.up.kernel"])
            result = (_silu(gate) * other) @ w["mlp.down.kernel"]
            x = x + drop(result.reshape(b, s, -1), model.hidden_dropout, (layer + 1, 3))
            continue
        scores = y @ w["mlp.router.kernel"]
        share, chosen, p = route(scores, model, w.get("mlp.router.bias", 0.0))
        both = jnp.einsum("th,ehcf->cetf", y, w["mlp.up"])
        each = jnp.einsum("etf,efh->eth", _silu(both[0]) * both[1], w["mlp.down"])
        result = jnp.einsum("te,eth->th", share, each)
        if model.shared_width:
            gate, other = jnp.einsum("th,hcf->ctf", y, w["mlp.shared.up.kernel"])
            result = result + (_silu(gate) * other) @ w["mlp.shared.down.kernel"]
        x = x + drop(result.reshape(b, s, -1), model.hidden_dropout, (layer + 1, 3))
        of_sequence = (chosen * 1.0).reshape(b, s, -1).mean(1) / model.experts_per_token, p.reshape(b, s, -1).mean(1)
        balance += model.experts * (of_sequence[0] * of_sequence[1]).sum(-1).mean() / layers
        tokens = (chosen * 1.0).sum(0)
        busiest = jnp.maximum(busiest, tokens.max() / tokens.mean())
        loads.append(tokens)
        entropy += -(p * jnp.log(p)).sum(-1).mean() / layers
        z += (jnp.log(jnp.exp(scores).sum(-1)) ** 2).mean() / layers
    x = _norm(x, weights["final_norm.scale"], model.norm_epsilon)
    table = weights["embedding.table" if model.tied else "head.table"]
    scores = (x @ table.T)[..., : model.vocabulary]
    return scores, (entropy, balance, z, busiest, jnp.stack(loads))


def total(weights, model, batch, masks):
    """The loss with its auxiliary losses; the figures and the tokens of experts."""
    found, loads = figures(weights, model, batch, masks)
    layers = len(loads)
    return found[0] + layers * (model.balance_loss * found[2] + model.z_loss * found[3]), (found, loads)


def loss_and_gradients(weights, model, batch, masks=None):
    """The figures, and the gradients of the loss with its balance and z-loss."""
    (_, (found, _)), gradients = _differentiated(weights, model, batch, masks)
    return found, gradients


def trained(weights, model, batches, optimizer):
    """Loss of each step and weights after the last one: AdamW (arXiv 1711.05101) with a constant learning rate, and
    the bias of routers, which counts tokens."""
    weights, losses = dict(weights), []
    first, second = (dict.fromkeys(weights, 0.0) for _ in range(2))
    for step, batch in enumerate(batches, 1):
        (_, (found, loads)), gradients = _differentiated(weights, model, batch, None)
        losses.append(float(found[0]))
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        for name, gradient in gradients.items():
            gradient = np.asarray(gradient) * min(1, optimizer.clip_norm / (norm + 1e-6))
            first[name] = optimizer.beta1 * first[name] + (1 - optimizer.beta1) * gradient
            second[name] = optimizer.beta2 * second[name] + (1 - optimizer.beta2) * gradient**2
            root = np.sqrt(second[name] / (1 - optimizer.beta2**step))
            update = first[name] / (1 - optimizer.beta1**step) / (root + optimizer.epsilon)
            if not name.endswith(("bias", "scale")):
                update = update + optimizer.weight_decay * weights[name]
            weights[name] = weights[name] - np.float32(optimizer.learning_rate) * update
        fewer = np.asarray(loads) * model.experts < np.asarray(loads).sum(-1, keepdims=True)
        more = np.asarray(loads) * model.experts > np.asarray(loads).sum(-1, keepdims=True)
        (bias,) = (name for name in weights if name.endswith("router.bias"))
        weights[bias] = weights[bias] + model.balance_bias * (1.0 * fewer - more)
    return losses, weights


_differentiated = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1, compiler_options=QUICKLY)
