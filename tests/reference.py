"""One serial transformer in float64, written from the papers and from nothing in mjax: the oracle of the tests.

One device, no sharding, no scan, no recomputation. It is put together from parts: norms, positions, attention, an MLP
or experts, and heads. The fields of a model's config choose among them. Weights are a flat {name: array} of whole
matrices. Every expert computes every token. Dropout masks are computed here a second time, with NumPy's integers.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

# Compiled quickly rather than well: it runs once or twice.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


GEMMA = {"norms": "pre and post", "qk_norm": "head", "tie_embeddings": True}


def option(model, name, default=None):
    """A field of the config of a model, which may not have it."""
    return getattr(model, name, GEMMA.get(name, default) if model.kind == "gemma3" else default)


# --- Dropout ----------------------------------------------------------------------------------------------------------

M32 = np.uint64(0xFFFFFFFF)


def _mix(x):
    x = np.asarray(x, np.uint64) & M32
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)) & M32
    return x ^ (x >> np.uint64(16))


def _fold(words, number):
    step = np.array([number, (number + 0x85EBCA6B) & 0xFFFFFFFF], np.uint64)
    return _mix(_mix(words + step) ^ words[::-1])


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
    words = _fold(_mix(np.array([seed, seed ^ 0x9E3779B9], np.uint64)), step)
    hidden, scores = (b, s, model.hidden), (b, model.heads, s, s)

    def keep(layer, site, rate, shape):
        return _keep(_fold(_fold(words, layer), site), rate, shape)

    masks = {
        (0, 0): keep(0, 0, model.hidden_dropout, hidden),
        (0, 4): keep(0, 4, model.hidden_dropout, (b, model.hidden)),
    }
    for layer in range(1, model.layers + 1):
        masks[layer, 1] = keep(layer, 1, model.attention_dropout, scores)
        masks[layer, 2] = keep(layer, 2, model.hidden_dropout, hidden)
        masks[layer, 3] = keep(layer, 3, model.hidden_dropout, hidden)
    return masks


def drop(x, rate, masks, place):
    return x if masks is None or rate == 0 else x * masks[place] / (1 - rate)


# --- Parts ------------------------------------------------------------------------------------------------------------


def norm(x, weights, name, model, dims=-1):
    """LayerNorm (arXiv 1607.06450), or without a bias RMSNorm (arXiv 1910.07467)."""
    bias = weights.get(f"{name}.bias")
    if bias is not None:
        x = x - x.mean(dims, keepdims=True)
    epsilon = option(model, "layernorm_epsilon") or model.norm_epsilon
    scale = weights[f"{name}.scale"] + (model.kind == "gemma3")  # Gemma's weight is added to 1
    x = x / jnp.sqrt((x * x).mean(dims, keepdims=True) + epsilon) * scale
    return x if bias is None else x + bias


def activated(x, name):
    """arXiv 1606.08415: GELU, exact and with tanh; and SiLU."""
    if name == "silu":
        return x / (1 + jnp.exp(-x))
    if name == "gelu_erf":
        return 0.5 * x * (1 + jax.scipy.special.erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def alibi_slopes(heads):
    """Return the slopes of the authors' code (arXiv 2108.12409, footnote 8), by recursion."""
    lower = 2 ** int(np.floor(np.log2(heads)))
    if heads == lower:
        start = 2 ** -(2 ** -(np.log2(heads) - 3))
        return [start * start**i for i in range(heads)]
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[::2][: heads - lower]


def frequencies(model, window=False):
    """Radians a position of each pair of dims (arXiv 2104.09864), lowered for sequences longer than in pretraining; and
    the factor of sines and cosines. Gemma 3 has another base in layers with a window (arXiv 2503.19786, section 2)."""
    if window and option(model, "local_rope_theta"):
        return model.local_rope_theta ** (-np.arange(0, model.head_size, 2) / model.head_size), 1.0
    dims = option(model, "qk_rope_head_dim") or int(model.head_size * option(model, "rotary_percent", 1.0))
    plain = np.array([model.rope_theta ** (-2 * i / dims) for i in range(dims // 2)])
    lowered, original = plain / model.rope_factor, model.rope_original_length
    if model.rope_scaling == "linear":
        return lowered, 1.0
    if model.rope_scaling == "llama3":  # Llama 3.1's apply_scaling
        wavelength = 2 * np.pi / plain
        smooth = (original / wavelength - 1) / (4 - 1)
        between = (1 - smooth) * lowered + smooth * plain
        return np.where(wavelength > original, lowered, np.where(wavelength < original / 4, plain, between)), 1.0
    if model.rope_scaling == "yarn":  # arXiv 2309.00071, as in its authors' code
        of_turns = lambda n: dims * np.log(original / (n * 2 * np.pi)) / (2 * np.log(model.rope_theta))  # noqa: E731
        fast = option(model, "rope_beta_fast", 32)
        low, high = max(np.floor(of_turns(fast)), 0), min(np.ceil(of_turns(1)), dims - 1)
        ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
        return lowered * ramp + plain * (1 - ramp), 0.1 * np.log(model.rope_factor) + 1
    return plain, 1.0


def turned(x, places, model, window):
    """Pairs (i, i + dims / 2) as complex numbers, turned by an angle: x [b, s, n, d], places [b or 1, s]."""
    radians, magnitude = frequencies(model, window)
    half = len(radians)
    turn = magnitude * jnp.exp(1j * places[..., None] * radians)[:, :, None]
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return jnp.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def projected(w, x):
    """Queries, keys and values [b, s, heads, d]: of one matrix, or of two with fewer heads of keys and values."""

    def linear(name):
        return jnp.tensordot(x, w[f"attention.{name}.kernel"], 1) + w.get(f"attention.{name}.bias", 0.0)

    if "attention.qkv.kernel" in w:
        qkv = linear("qkv")
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    key_value = linear("key_value")
    return linear("query"), key_value[:, :, 0], key_value[:, :, 1]


def attention(w, x, model, batch, layer, masks):
    q, k, v = projected(w, x)
    if (dims := {"head": -1, "heads": (-2, -1)}.get(option(model, "qk_norm"))) is not None:
        q, k = norm(q, w, "attention.query_norm", model, dims), norm(k, w, "attention.key_norm", model, dims)
    order, every = np.arange(x.shape[1]), option(model, "global_attention_interval")
    window = model.window and not (every and (layer + 1) % every == 0)
    if option(model, "rope_theta"):
        places = batch.get("positions", order[None])
        q, k = turned(q, places, model, window), turned(k, places, model, window)
    k, v = (jnp.repeat(part, q.shape[2] // part.shape[2], axis=2) for part in (k, v))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(option(model, "query_pre_attn_scalar", model.head_size))
    if option(model, "positions") == "alibi":  # the form that grows with the key alone, which gives the same softmax
        scores = scores + np.array(alibi_slopes(model.heads))[:, None, None] * order
    y = attended(scores, v, model, batch, window, masks, layer)
    return jnp.einsum("bqnd,ndh->bqh", y, w["attention.out.kernel"]) + w.get("attention.out.bias", 0.0)


def latent_attention(w, x, model, batch, layer, masks):
    """arXiv 2405.04434, section 2.1.2, with a score that has a part of the latent and one of the shared key."""
    linear = lambda name, x: jnp.tensordot(x, w[f"attention.{name}.kernel"], 1)  # noqa: E731
    latent_norm = lambda name, x: norm(x, w, f"attention.{name}_norm", model)  # noqa: E731
    narrow = "attention.q_down.kernel" in w
    q = linear("q_up", latent_norm("q", linear("q_down", x))) if narrow else linear("query", x)
    compressed = linear("kv_down", x)
    rank, plain = model.kv_lora_rank, model.qk_nope_head_dim
    kv = linear("kv_up", latent_norm("kv", compressed[..., :rank]))
    radians, _ = frequencies(model)
    turn = jnp.exp(1j * batch.get("positions", np.arange(x.shape[1])[None])[..., None] * radians)
    key = (compressed[..., rank::2] + 1j * compressed[..., rank + 1 :: 2]) * turn  # neighbors are a complex number
    query = (q[..., plain::2] + 1j * q[..., plain + 1 :: 2]) * turn[:, :, None]
    scores = jnp.einsum("bqnd,bknd->bnqk", q[..., :plain], kv[..., :plain])
    scores = scores + jnp.einsum("bqnc,bkc->bnqk", query, key.conj()).real
    if model.rope_scaling == "yarn":
        scores = scores * (0.1 * model.rope_mscale * np.log(model.rope_factor) + 1) ** 2
    y = attended(scores / np.sqrt(model.head_size), kv[..., plain:], model, batch, None, masks, layer)
    return jnp.einsum("bqnd,ndh->bqh", y, w["attention.out.kernel"])


def attended(scores, v, model, batch, window, masks, layer):
    order = np.arange(scores.shape[-1])
    visible = np.ones((1, 1, len(order), len(order)), bool)  # [b, 1, query, key]
    if model.causal:
        visible = visible & (order[:, None] >= order)
    if window:
        visible = visible & (order[:, None] - order < model.window)
    if "documents" in batch:
        visible = visible & (batch["documents"][:, None, :, None] == batch["documents"][:, None, None])
    p = drop(jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), model.attention_dropout, masks, (layer + 1, 1))
    return jnp.einsum("bnqk,bknd->bqnd", p, v)


def mlp(w, x, model, name="mlp"):
    """Two matrices with an activation between them, or a gated one (arXiv 2002.05202)."""
    up = jnp.tensordot(x, w[f"{name}.up.kernel"], 1) + w.get(f"{name}.up.bias", 0.0)
    gated = w[f"{name}.up.kernel"].ndim == 3
    y = activated(up[..., 0, :], model.activation) * up[..., 1, :] if gated else activated(up, model.activation)
    return y @ w[f"{name}.down.kernel"] + w.get(f"{name}.down.bias", 0.0)


def route(scores, model, bias=0.0):
    """The weight of every expert for every token [b, s, E], 0 for those not chosen; 1 for those; and their shares."""
    each = jax.nn.softmax(scores) if model.router == "softmax" else 1 / (1 + jnp.exp(-scores))
    preferred = each + bias
    if model.router_n_groups > 1:  # arXiv 2412.19437, section 2.1.2: groups by the sum of their best
        groups = preferred.reshape(*each.shape[:-1], model.router_n_groups, -1)
        best = jnp.sort(groups, -1)[..., -model.router_group_best :].sum(-1)
        worst_chosen = jnp.sort(best, -1)[..., -model.top_groups][..., None]
        preferred = jnp.where((best >= worst_chosen)[..., None], groups, -jnp.inf).reshape(each.shape)
    chosen = preferred >= jnp.sort(preferred, -1)[..., -model.experts_per_token][..., None]
    weights = each * chosen
    if model.router_normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * model.router_scale, 1.0 * chosen, each / each.sum(-1, keepdims=True)


def experts(w, x, model):
    """The experts' results, and (entropy, balance loss of sequences, z-loss, tokens of every expert [E])."""
    scores = x @ w["mlp.router.kernel"]
    weights, chosen, p = route(scores, model, w.get("mlp.router.bias", 0.0))
    both = jnp.einsum("bsh,ehcf->cbsef", x, w["mlp.up"])
    y = jnp.einsum("bse,bsef,efh->bsh", weights, activated(both[0], model.activation) * both[1], w["mlp.down"])
    if model.shared_expert_ffn_hidden:
        y = y + mlp(w, x, model, "mlp.shared")
    used = chosen.mean(1) / model.experts_per_token  # of each sequence
    balance = model.experts * (used * p.mean(1)).sum(-1).mean()
    z = (jax.scipy.special.logsumexp(scores, axis=-1) ** 2).mean()
    return y, (-(p * jnp.log(p)).sum(-1).mean(), balance, z, chosen.sum((0, 1)))


# --- The model --------------------------------------------------------------------------------------------------------

STACK = re.compile(r"blocks\.(?:(\d+)\.)?(?:turns\.(\d+)\.)?")


def layers_of(weights):
    """The weights of every layer: of stacks one after the other, whose layers may take turns."""
    stacks = {}
    for name, array in weights.items():
        if found := STACK.match(name):
            place = tuple(int(number or 0) for number in found.groups())
            stacks.setdefault(place, {})[name[found.end() :]] = array
    depth = {place: len(next(iter(stack.values()))) for place, stack in stacks.items()}
    order = sorted((stack, i, turn) for (stack, turn), layers in depth.items() for i in range(layers))
    return [{name: array[i] for name, array in stacks[stack, turn].items()} for stack, i, turn in order]


def embedded(weights, model, batch, masks):
    x = weights["embedding.table"][batch["tokens"]]
    if "positions" in weights:
        x = x + weights["positions"][batch.get("positions", np.arange(x.shape[1]))]
    if "token_types" in weights:
        x = x + weights["token_types"][batch["token_types"]]
    if "embedding_norm.scale" in weights:
        x = norm(x, weights, "embedding_norm", model)
    if model.kind == "gemma3":
        x = x * np.sqrt(model.hidden)
    return drop(x, model.hidden_dropout, masks, (0, 0))


def encoded(weights, model, batch, masks=None):
    """The stream that the heads read [b, s, h], and what the experts of each layer report."""
    # Norms before each part (arXiv 1909.08053, figure 7b), after each sum (7a), of the branch's output (2501.00656), or
    # before each part and of the branch's output (Gemma).
    norms = {"pre": "input", "post": "output", "pre and post": "both"}[option(model, "norms", "pre")]
    norms = "sum" if option(model, "layernorm") == "post" else norms
    x, reports = embedded(weights, model, batch, masks), []
    for layer, w in enumerate(layers_of(weights)):
        x = block(w, x, model, batch, layer, masks, norms, reports)
    return norm(x, weights, "final_norm", model) if "final_norm.scale" in weights else x, reports


def block(w, x, model, batch, layer, masks, norms, reports):
    attend = latent_attention if "attention.kv_down.kernel" in w else attention
    for site, name in ((2, "attention_norm"), (3, "mlp_norm")):
        y = norm(x, w, name, model) if norms in ("input", "both") else x
        if name == "attention_norm":
            y = attend(w, y, model, batch, layer, masks)
        elif "mlp.router.kernel" in w:
            y, report = experts(w, y, model)
            reports.append(report)
        else:
            y = mlp(w, y, model)
        y = norm(y, w, name, model) if norms == "output" else y
        y = norm(y, w, name.replace("_norm", "_out_norm"), model) if norms == "both" else y
        x = x + drop(y, model.hidden_dropout, masks, (layer + 1, site))
        x = norm(x, w, name, model) if norms == "sum" else x
    return x


def further_loss(weights, model, batch, x, reports):
    """The loss of the tokens two after each, where these are in its document (arXiv 2412.19437, section 2.2)."""
    w = {name.removeprefix("mtp."): array for name, array in weights.items() if name.startswith("mtp.")}
    next_tokens = jnp.concatenate([batch["tokens"][:, 1:], batch["labels"][:, -1:]], axis=1)
    embedding = weights["embedding.table"][next_tokens]
    both = norm(embedding, w, "embedding_norm", model), norm(x, w, "hidden_norm", model)
    y = jnp.concatenate(both, -1) @ w["projection.kernel"]
    layer = {name.removeprefix("block."): array for name, array in w.items() if name.startswith("block.")}
    y = norm(block(layer, y, model, batch, model.layers, None, "input", reports), w, "final_norm", model)
    counts = batch.get("loss_mask", np.ones(batch["labels"].shape))[:, 1:] * 1.0
    if "positions" in batch:
        counts = counts * (batch["positions"][:, 1:] > 0)
    losses = cross_entropy(next_token_scores(weights, model, y)[:, :-1], batch["labels"][:, 1:])
    return (losses * counts).sum() / counts.sum()


def linear(weights, name, x):
    return x @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def next_token_scores(weights, model, x):
    table = weights.get("head.table", weights["embedding.table"])
    return (x @ table.T)[..., : model.vocabulary]  # the rest is padding


def masked_token_scores(weights, model, x):
    y = activated(linear(weights, "mlm.transform", x), model.mlm_activation or model.activation)
    y = norm(y, weights, "mlm.norm", model)
    return (y @ weights["embedding.table"].T + weights["mlm.bias"])[..., : model.vocabulary]


def pooled(weights, x):
    return jnp.tanh(linear(weights, "pooler", x[:, 0]))


def cross_entropy(scores, labels):
    return jax.scipy.special.logsumexp(scores, -1) - jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def mean(values, counts):
    return values.mean() if counts is None else (values * counts).sum() / counts.sum()


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICKLY)
def scores(weights, model, batch):
    """Scores of the next token at every position [b, s, v]."""
    return next_token_scores(weights, model, encoded(weights, model, batch)[0])


@functools.partial(jax.jit, static_argnums=1)
def task_scores(weights, model, batch, masks=None):
    """Return scores of classes or choices [b, n], or of an answer's first and last token [b, 2, s], -inf at padding."""
    rows = {name: array.reshape(-1, model.sequence) for name, array in batch.items() if array.ndim == 3}
    x, _ = encoded(weights, model, rows, masks)
    if model.head == "span":
        ends = linear(weights, "head", x).swapaxes(1, 2)
        return jnp.where(rows["documents"][:, None] == 0, ends, -jnp.inf)
    found = drop(pooled(weights, x), model.hidden_dropout, masks, (0, 4))
    return linear(weights, "head", found).reshape(-1, model.num_labels)


def task_loss(weights, model, batch, masks=None):
    """Mean cross entropy of the labels, of a span of both its ends, and the share of samples that are right."""
    found = task_scores(weights, model, batch, masks)
    labels = jnp.stack([batch[name] for name in model.label_names], -1)
    found = found.reshape(*labels.shape, -1)
    return cross_entropy(found, labels).mean(), (found.argmax(-1) == labels).all(-1).mean()


def bert_losses(weights, model, batch, masks=None):
    """Megatron's losses, of masked tokens and of the order of segments, and the share of orders found."""
    x, _ = encoded(weights, model, batch, masks)
    masked = cross_entropy(masked_token_scores(weights, model, x), batch["labels"])
    of_order = linear(weights, "order", pooled(weights, x))
    order = cross_entropy(of_order, batch["sentence_order"]).mean()
    return mean(masked, batch["loss_mask"]), order, (of_order.argmax(-1) == batch["sentence_order"]).mean()


def total(weights, model, batch, masks=None):
    """The loss that is differentiated; and what is reported, in the order of `small.MEANS`, and the tokens of every
    expert [l, E]."""
    if model.kind == "bert_task":
        loss, right = task_loss(weights, model, batch, masks)
        return loss, (jnp.stack([loss, right]), None)
    if model.kind == "bert":
        masked, order, found = bert_losses(weights, model, batch, masks)
        return masked + order, (jnp.stack([masked, order, found]), None)
    x, reports = encoded(weights, model, batch, masks)
    loss = mean(cross_entropy(next_token_scores(weights, model, x), batch["labels"]), batch.get("loss_mask"))
    if not reports:
        return loss, (loss, None)
    further = [further_loss(weights, model, batch, x, reports)] if option(model, "mtp_layers") else []
    entropy, balance, z, loads = (jnp.stack(each) for each in zip(*reports, strict=True))
    busiest = (loads.max(-1) / loads.mean(-1)).max()
    figures = jnp.stack([loss, entropy.mean(), balance.mean(), z.mean(), busiest, *further])
    loss = loss + sum(model.mtp_loss_coef * each for each in further)
    return loss + model.aux_loss_coef * balance.sum() + model.z_loss * z.sum(), (figures, loads)


differentiated = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1, compiler_options=QUICKLY)


def loss_and_gradients(weights, model, batch, masks=None):
    """Return the reported values, and the gradients of the loss."""
    (_, (figures, _)), gradients = differentiated(weights, model, batch, masks)
    return figures, gradients
