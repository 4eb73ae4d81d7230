"""BERT as Megatron trains it: it predicts masked tokens from both sides, and the order of two segments of text.

    tokens, positions, token types ── layers ─┬─ each token ── MLM head ──────────── which token was masked?
                                              └─ the first ─── pooler, order head ── are the segments swapped?

    layers       as in GPT, but attention is bidirectional
    MLM head     linear ─ GELU ─ LayerNorm ─ the embedding as output layer, and a bias for each token (arXiv 1810.04805)
    pooler       linear ─ tanh, of the first token of each sequence, [CLS]
    order head   linear, to 2: in order or swapped; sentence order (arXiv 1909.11942) instead of next-sentence
      prediction

Layers, mesh and pipeline are the same as for GPT; only the architecture differs. The output layer and its bias are
split by vocabulary, like the embedding. The three small linear layers are replicated over `model`: together they have
two matrices of h × h, a sixth of a layer. With sequence parallelism each rank runs them on its rows.

The place of LayerNorm is an option (arXiv 1909.08053, figure 7). `post` is the original BERT, whose embedding has a
LayerNorm too. `pre` leaves the residual stream free from embedding to heads, with one LayerNorm at its end; beyond 336M
parameters only this one improved with size.

`Encoder` is the part that stays when the model is fine-tuned for a task, with another head (`TaskBERT`):

    classification    pooler ─ dropout ─ linear, to one score per class       is the second sentence implied?
    multiple choice   the same to one score; each choice of a question is     which of four answers?
                      a separate sequence, and their scores are compared
    span              linear, of each token to two scores: first token,       where in the text is the answer?
                      and last token of the answer

The loss is the cross entropy of the label among the scores: classes, choices, or positions of a sequence, for a span
the mean of both ends. Padding positions are excluded. Sources: Megatron-LM v1.0, megatron/model/classification.py and
multiple_choice.py; for spans arXiv 1810.04805, section 4.2, with neither pooler nor dropout.

Heads are replicated over `model`, like the pre-training heads. With sequence parallelism a rank computes the scores of
its rows only; they are few, and are combined before the loss.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mjax.config.axes import CONTEXT, MODEL
from mjax.models.bert.config import BERTConfig, BERTTaskConfig, EncoderConfig
from mjax.models.block import Block, PostNormBlock
from mjax.models.causal import Output
from mjax.models.gpt.model import transformer_layer
from mjax.models.parts.mask import MASKED
from mjax.models.parts.mlp import activate
from mjax.models.parts.norms import LayerNorm
from mjax.models.parts.positions import position_embeddings
from mjax.models.protocol import ForwardContext, LanguageModel
from mjax.models.stack import stack
from mjax.parallel import mappings, random
from mjax.parallel.autodiff import rematerialize
from mjax.parallel.layers import VocabParallelEmbedding, normal_init, to_local_ids
from mjax.parallel.linear import linear
from mjax.parallel.random import dropout
from mjax.parallel.reductions import accumulation_dtype, add_bias, lookup
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import make_param

TOKEN_TYPES = 2

HEAD = "head."  # prefix of the weights of a task's head, which no other task can use, whatever its shape


class Linear(nnx.Module):
    """y = x A + b, replicated over `model`."""

    def __init__(self, key: Array, width: int, out: int, std: float, dtype):
        self.kernel = make_param(key, normal_init(std), (width, out), ("in", "out"), dtype, muon=False)
        self.bias = make_param(key, jax.nn.initializers.zeros, (out,), ("out",), dtype)

    def __call__(self, x: Float[Array, "t into"]) -> Float[Array, "t out"]:
        return add_bias(linear(self.kernel[...], x, 1), self.bias[...])


class MLMHead(nnx.Module):
    """The head that scores the original token at each position, from the residual stream after the last norm."""

    def __init__(self, key: Array, config: BERTConfig, dtype):
        self.activation = config.mlm_activation or config.activation
        self.transform = Linear(key, config.hidden, config.hidden, config.init_std, dtype)
        self.norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        self.bias = make_param(key, jax.nn.initializers.zeros, (config.padded_vocabulary,), ("token",), dtype)

    def __call__(self, x: Float[Array, "t h"], embedding: VocabParallelEmbedding) -> Output:
        activation = rematerialize(partial(activate, name=self.activation))
        return Output(embedding, self.norm(activation(self.transform(x))), self.bias[...])


class Encoder(LanguageModel):
    """Embeddings and layers: a BERT without its heads. `pool` is for models with a pooler."""

    after_layers = ("final_norm", "head", "mlm", "order", "pooler")

    def __init__(self, keys: Sequence[Array], config: EncoderConfig, dtype):
        embedding, positions, token_types, blocks = keys
        self.config = config
        hidden, std = config.hidden, config.init_std
        sizes = config.vocabulary, config.padded_vocabulary, hidden, std
        self.embedding = VocabParallelEmbedding(embedding, *sizes, dtype)
        rows = partial(make_param, initializer=normal_init(std), dims=("position", "out"), dtype=dtype)
        self.positions = rows(positions, shape=(config.max_positions, hidden))
        self.token_types = rows(token_types, shape=(TOKEN_TYPES, hidden))
        block = Block if config.layernorm == "pre" else PostNormBlock
        self.blocks = stack(blocks, config, partial(transformer_layer, config=config, dtype=dtype, block=block))
        norm = LayerNorm(hidden, config.layernorm_epsilon, dtype)
        if config.layernorm == "pre":
            self.final_norm = norm
        else:
            self.embedding_norm = norm

    def embed(self, batch: dict[str, Array], context: ForwardContext) -> Float[Array, "t h"]:
        """The stream before the first layer, of `tokens` and `token_types`, int [b, s]."""
        tokens, token_types = context.tokens, context.tokens.local_rows(batch["token_types"].reshape(-1))
        x = self.embedding(batch["tokens"], tokens)
        x = x + tokens.local_rows(position_embeddings(self.positions[...], tokens))
        # A matmul rather than a lookup: its gradient sums all rows of a type in float32, in any order.
        x = x + jax.nn.one_hot(token_types, TOKEN_TYPES, dtype=x.dtype) @ self.token_types[...]
        if self.config.layernorm == "post":
            x = self.embedding_norm(x)
        return context.with_layer(0).dropout(x, self.config.hidden_dropout, random.EMBEDDING)

    def head_input(self, x: Float[Array, "t h"]) -> Float[Array, "t h"]:
        """The input of the heads, from the residual stream after the last layer."""
        return self.final_norm(x) if self.config.layernorm == "pre" else x

    def pool(self, x: Float[Array, "t h"], tokens: TokenLayout) -> tuple[Float[Array, "b h"], Bool[Array, " b"]]:
        """The pooler's output for each sequence, from its first token.

        Args:
          x: the result of `head_input`.

        Returns:
          The outputs, and for which sequences they are valid: with sequence parallelism, or sequences split over
          `context`, a rank has only those whose first token it has.
        """
        rows = jnp.arange(tokens.sequences) * tokens.positions
        is_local = jnp.ones(rows.shape, bool)
        if tokens.sequence_parallel:
            rows, is_local = to_local_ids(rows, x.shape[0])
        if tokens.context_attention:
            is_local = is_local & (mappings.rank(CONTEXT) == 0)
        return jnp.tanh(self.pooler(lookup(x, rows))), is_local


class BERT(Encoder):
    """An encoder with a head for masked tokens and one for the order of two segments of text.

    Its loss is the mean cross entropy of the masked tokens plus the cross entropy of the order (Megatron's lm loss and
    sop loss); it also reports the accuracy of the order.
    """

    loss_weights: ClassVar[dict[str, float]] = {"mlm_loss": 1.0, "order_loss": 1.0}

    def __init__(self, key: Array, config: BERTConfig, dtype=jnp.float32):
        *encoder, mlm, pooler, order = jax.random.split(key, 7)
        super().__init__(encoder, config, dtype)
        self.mlm = MLMHead(mlm, config, dtype)
        self.pooler = Linear(pooler, config.hidden, config.hidden, config.init_std, dtype)
        self.order = Linear(order, config.hidden, 2, config.init_std, dtype)

    def output(self, x: Float[Array, "t h"]) -> Output:
        """The scores of the original token at each position, from the result of `head_input`."""
        return self.mlm(x, self.embedding)

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        """The number of masked tokens, and of sequences."""
        sequences = mappings.mask_count_to_first_context_rank(len(batch["sentence_order"]))
        masked = batch["loss_mask"].sum(dtype=jnp.int32)
        return {"mlm_loss": masked, "order_loss": sequences, "order_accuracy": sequences}

    def loss(self, x: Float[Array, "t h"], batch: dict[str, Array], context: ForwardContext) -> dict[str, Array]:
        """Return the cross entropies of the masked tokens and of the sequence order, and the number of correct orders.

        These heads have no dropout.
        """
        tokens = context.tokens
        x = self.head_input(x)
        losses = self.output(x).cross_entropy(batch["labels"], context)
        masked = losses.sum(where=batch["loss_mask"].reshape(-1))

        pooled, is_local = self.pool(x, tokens)
        scores = self.order(pooled)
        log_probabilities = jax.nn.log_softmax(scores.astype(losses.dtype), axis=-1)
        swapped = batch["sentence_order"]
        order = -jnp.take_along_axis(log_probabilities, swapped[:, None], axis=-1)[:, 0]
        correct = (scores[:, 1] > scores[:, 0]) == (swapped == 1)
        sums = jnp.stack([order.sum(where=is_local), correct.sum(where=is_local, dtype=order.dtype)])
        order_loss, order_correct = mappings.reduce_from_region(sums) if tokens.sequence_parallel else sums
        return {"mlm_loss": masked, "order_loss": order_loss, "order_accuracy": order_correct}


class TaskBERT(Encoder):
    """An encoder with the head of a task, `config.head`."""

    loss_weights: ClassVar[dict[str, float]] = {"loss": 1.0}

    def __init__(self, key: Array, config: BERTTaskConfig, dtype=jnp.float32):
        *encoder, pooler, head = jax.random.split(key, 6)
        super().__init__(encoder, config, dtype)
        if config.head != "span":
            self.pooler = Linear(pooler, config.hidden, config.hidden, config.init_std, dtype)
        self.head = Linear(head, config.hidden, config.outputs, config.init_std, dtype)

    def scores(self, x: Float[Array, "t h"], batch: dict[str, Array], context: ForwardContext) -> Float[Array, "b ..."]:
        """The scores of each sample, from the residual stream after the last layer.

        Args:
          x: this rank's rows.
          batch: the arrays of `BERTTaskConfig.batch`, c sequences per sample, [b · c, s].
          context: of its tokens.

        Returns:
          Scores of the classes [b, classes], of the choices [b, c], or of each token as the answer's first and last one
          [b, 2, s]. They are float32 or wider, −1e30 at padding, replicated over `model`.
        """
        x, tokens = self.head_input(x), context.tokens
        if self.config.head == "span":
            scores = self.head(x)
            if tokens.sequence_parallel:
                scores = mappings.all_gather_invariant(scores.T, MODEL, -1).T
            scores = tokens.gather_positions(tokens.split_sequences(_wide(scores))).swapaxes(1, 2)  # [b, 2, s]
            return jnp.where(context.documents[:, None] == 0, scores, MASKED)
        pooled, is_local = self.pool(x, tokens)
        pooled = dropout(pooled, self.config.hidden_dropout, context.with_layer(0).layer_key(random.HEAD))
        scores = _wide(self.head(pooled))
        split_over = [MODEL] * tokens.sequence_parallel + [CONTEXT] * (tokens.context_attention is not None)
        if split_over:
            scores = jnp.where(is_local[:, None], scores, 0)
        for axis in split_over:
            scores = mappings.reduce_from_region(scores, axis)
        return scores.reshape(-1, self.config.num_labels)

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        """The number of samples."""
        samples = mappings.mask_count_to_first_context_rank(len(batch[self.config.label_names[0]]))
        return {"loss": samples, "accuracy": samples}

    def loss(self, x: Float[Array, "t h"], batch: dict[str, Array], context: ForwardContext) -> dict[str, Array]:
        """The cross entropy of the labels, and the number of samples whose labels have the highest scores."""
        scores = self.scores(x, batch, context)
        labels = jnp.stack([batch[name] for name in self.config.label_names], axis=1)  # [b, 1], for a span [b, 2]
        scores = scores.reshape(*labels.shape, -1)
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        losses = -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1).mean((1, 2))
        right = (scores.argmax(-1) == labels).all(1)
        return {
            "loss": mappings.mask_to_first_context_rank(losses.sum()),
            "accuracy": mappings.mask_to_first_context_rank(right.sum(dtype=losses.dtype)),
        }


def _wide(scores: Array) -> Array:
    return scores.astype(accumulation_dtype(scores.dtype))
