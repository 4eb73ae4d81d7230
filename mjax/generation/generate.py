"""Text generation: continue prompts with a model, token by token, on the device.

Attention reads the keys and values of every earlier position. They do not change once computed, so they are cached, and
a new token costs one position of work instead of a whole sequence:

    weights   master weights of stacked layers      → weights in the compute dtype, layer by layer
    prefill   all prompts in one forward pass       → logits after each prompt, and a cache of each layer
    decode    sample a token from the logits, run it → logits after it, cache with one more slot

Each is one program, a `shard_map`. The last is a `while_loop`, which ends as soon as every sequence has ended: no token
passes through Python, unless a callback streams the text. The cache is written in place. The weights are split over
`model` as in training, and positions over `context`: each of its ranks reads a part of the prompts and stores a part of
the cache. Replicas along `data` do the same work, so every process of a cluster has the result.

**Positions.** A token's slot in the cache is its position. Prompts of different lengths are padded on the right; each
sequence overwrites its padding with its next tokens (`write_cache` explains why padding is never read).

**Compilation.** Widths of prompts and of the cache are rounded up (`pad_width`), and everything else about a request
is an argument, so a second request of similar size compiles nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from mjax.config import Config
from mjax.config.axes import CONTEXT, MODEL, PIPE
from mjax.config.bounds import check_bounds
from mjax.config.kernels import SLOTS, pad_width
from mjax.config.pattern import stage_kinds
from mjax.errors import UsageError
from mjax.generation import Sampling
from mjax.models import decoding
from mjax.models.block import Block, split_sums
from mjax.models.causal import CausalModel
from mjax.models.decoding import Cache, Layers
from mjax.models.parts.attention import Attention
from mjax.models.protocol import ForwardContext
from mjax.models.stack import iterate_runs, layer_runs, map_stacks
from mjax.parallel import mappings
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.pipeline import read_rows, run_branch, vary_over_pipe, write_rows
from mjax.parallel.reductions import tree_index
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.zero import Storage, gather_for_inference, layer_gather, num_layer_dims
from mjax.step.layout import Layout, build_layout
from mjax.step.precision import COMPUTE_TYPES

# --- Sampling: the next token from a row of logits --------------------------------------------------------------------
#
#     logits / temperature ─ top-k ─ top-p ─ Gumbel noise ─ argmax
#
# A token is sampled by the Gumbel-max rule: the argmax of logits / temperature + noise is distributed as their softmax.
# The noise of an id has a key folded from (seed, stream of the sequence, position). So every mesh generates the same
# tokens, and a continuation does not depend on the other prompts of a batch. Everything is float32.


def sample_tokens(logits: Array, positions: Array, vocabulary: int, request: dict[str, Array]) -> Array:
    """Sample the next token of each sequence: int32 [b].

    Args:
      logits: [b, v]; ids from `vocabulary` on are padding of the embedding and never sampled.
      positions: int [b], the positions of the new tokens.
      request: "temperature", "top_k", "top_p" and "seed", as in `Sampling`, scalars; and "streams", uint32 [b], of
        noise: sequences of one stream have the same noise.
    """
    is_token = jnp.arange(logits.shape[-1]) < vocabulary
    logits = jnp.where(is_token, logits.astype(jnp.float32), -jnp.inf)

    def noisy(logits):
        # Shift the largest to 0 first: divided by a tiny temperature, none overflows to +∞.
        scaled = (logits - logits.max(-1, keepdims=True)) / request["temperature"]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request["seed"]), request["streams"])
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
        return jnp.where(sampling_mask(scaled, request["top_k"], request["top_p"]), scaled + noise, -jnp.inf)

    scores = jax.lax.cond(request["temperature"] > 0, noisy, lambda logits: logits, logits)
    return jnp.argmax(scores, -1).astype(jnp.int32)


def sampling_mask(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Mask of the tokens that remain after top-k and then top-p: bool [b, v], at least one in each row.

    Tokens are ranked by logit, ties by id. The first `top_k` remain (0: all). Of these the first remain until their
    probability reaches `top_p` (arXiv 1904.09751, section 3.1: the smallest such set).

    Args:
      logits: float32 [b, v], divided by the temperature; −∞ where a token is impossible.
      top_k, top_p: scalars; they may be traced.
    """
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    first = (jnp.arange(logits.shape[-1]) < top_k) | (top_k == 0)
    ranked = jnp.where(first, jnp.take_along_axis(logits, order, -1), -jnp.inf)
    probabilities = jax.nn.softmax(ranked, -1)
    before = jnp.cumsum(probabilities, -1) - probabilities  # 0 for the first of a row, which always remains
    remains = first & ((before < top_p) | (top_p >= 1))
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, remains, axis=-1, inplace=False)


# --- Weights of inference, layer by layer -----------------------------------------------------------------------------
#
# For every token a loop over layers would copy its slices of the stacks: all weights, and the whole cache. Here each
# layer is sliced once (benchmarks/log/2026-11-28-generation.md).


def inference_weights(config: Config, layout: Layout, model: CausalModel) -> CausalModel:
    """Inside `shard_map`: the weights of inference. Without a pipeline the layers are unstacked."""
    weights = gather_for_inference(model, layout.plan, COMPUTE_TYPES[config.precision.compute])
    if config.mesh.pipe == 1:
        weights.blocks = nnx.List(unstack_layers(weights.blocks))
    return weights


def weight_specs(config: Config, layout: Layout):
    """PartitionSpecs of `inference_weights`."""

    def with_gathered_spec(leaf: jax.ShapeDtypeStruct, storage: Storage) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=NamedSharding(leaf.sharding.mesh, _inference_spec(storage)))

    weights = jax.tree.map(with_gathered_spec, layout.abstract_model, layout.plan)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
    if config.mesh.pipe == 1:
        specs.blocks = nnx.List(unstack_layers(weights.blocks, lambda leaf, _: P(*leaf.sharding.spec[1:])))
    return specs


def list_layers(config: Config, layout: Layout, weights: CausalModel) -> Layers:
    """Inside `shard_map`: all layers of `inference_weights`, with the methods of one."""
    dtype = COMPUTE_TYPES[config.precision.compute]
    gathers = map_stacks(lambda stack: layer_gather(stack, dtype, inference=True), layout.plan.blocks)
    if config.mesh.pipe == 1:
        return LayerList(weights.blocks, _list_slices(layout.abstract_model.blocks, gathers), cache_axes(config))
    rows = jax.tree.map(lambda storage: storage.rows, layout.plan.blocks)
    return PipelineLayers(config, weights.blocks, rows, gathers)


def cache_axes(config: Config) -> tuple[str, ...]:
    """Mesh axes whose ranks have different caches: of their layers, heads or positions."""
    return (*[PIPE] * (config.mesh.pipe > 1), MODEL, *[CONTEXT] * (config.context_attention is not None))


def _inference_spec(storage: Storage) -> P:
    """The PartitionSpec of a weight of `gather_for_inference`."""
    gathered = () if storage.gather_per_layer else {axis for names, _ in storage.gathers for axis in names}
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in storage.spec)
    spec = [tuple(axis for axis in entry if axis not in gathered) or None for entry in entries]
    if storage.rows is None or storage.rows.stages == 1:
        return P(*spec)
    layers = num_layer_dims(storage.rows)
    return P(PIPE, *(entry and (tuple(axis for axis in entry if axis != PIPE) or None) for entry in spec[layers:]))


def unstack_layers(blocks, take: Callable[[Any, int], Any] = lambda weight, repetition: weight[repetition]) -> list:
    """Each layer of `blocks`, unstacked, in order; `take` slices a weight at a repetition."""
    return [jax.tree.map(lambda weight: take(weight, i), stack) for stack, i, *_ in _list_slices(blocks)]  # noqa: B023


def _list_slices(blocks, gathers: Sequence[Sequence[Callable | None]] | None = None) -> list[tuple]:
    """List, for each layer of `blocks` in order, its stack, its repetition, the function that gathers its weights
    (`gathers` of `run_blocks`), and its kind."""
    slices = []
    for stacks, run_gathers, count in iterate_runs(blocks, gathers):
        for number in range(count):
            repetition, i = divmod(number, len(stacks))
            kinds = stacks[i].kinds
            slices.append((stacks[i], repetition, run_gathers[i], kinds[repetition % len(kinds)]))
    return slices


class LayerList(NamedTuple):
    """Layers one after the other, without a loop.

    Attributes:
      layers: unstacked.
      slices: of these layers, from `_list_slices`.
      axes: as `cache_axes`.
    """

    layers: Sequence
    slices: list[tuple]
    axes: tuple[str, ...]

    def empty_cache(self, sequences: int, slots: int, dtype) -> list:
        """The empty cache of each layer."""
        return self._pvary_cache([layer.empty_cache(sequences, slots, dtype) for layer in self.layers])

    def decode(
        self, x: Float[Array, "t h"], context: ForwardContext, cached: list, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], list]:
        """Decode like `Block.decode`, with the cache of each layer."""
        caches = []
        for layer, (_, _, gather, kind), cache in zip(self.layers, self.slices, cached, strict=True):
            block = layer if gather is None else gather(layer)
            x, cache = block.decode(x, replace(context, kind=kind), cache, lengths)
            caches.append(cache)
        return x, self._pvary_cache(caches)

    def _pvary_cache(self, cache: list) -> list:
        """The cache, typed to vary over `axes`, so that the types stay the same in loops."""
        return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset(self.axes)), cache)


class PipelineLayers(NamedTuple):
    """The layers of all stages of a pipeline. A cache has for each stack the caches of the layers of this stage, with a
    leading dim like the weights.

    Attributes:
      config: of the model.
      blocks: the layers of this stage.
      rows: a tree like `blocks`: the layers of each stage.
      gathers: of `run_blocks`.
    """

    config: Config
    blocks: Any
    rows: Any
    gathers: list

    def empty_cache(self, sequences: int, slots: int, dtype) -> list:
        """The empty caches of each stack on this stage."""

        def empty(stack) -> Any:
            weights = jax.tree.leaves(stack)[0]
            cache = jax.tree.map(itemgetter(0), stack).empty_cache(sequences, slots, dtype)
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(weights), *leaf.shape)), cache)

        caches = list(map(empty, chain(*layer_runs(self.blocks))))
        return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset(cache_axes(self.config))), caches)

    def decode(
        self, x: Float[Array, "t h"], context: ForwardContext, cached: list, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], list]:
        """Decode like `Block.decode`, one stage after the other, with the caches of the stacks."""
        stages, kinds = self.config.mesh.pipe, stage_kinds(self.config.model, self.config.mesh)
        rows = [jax.tree.leaves(stack)[0] for stack in chain(*layer_runs(self.rows))]

        def run_stage(kind: int, number: Array, x: Array, cached: list) -> tuple[Array, list]:
            read, write = (partial(move, kinds.index(kind), number) for move in (read_rows, write_rows))
            chunk = jax.tree.map(read, self.rows, self.blocks)
            local = [jax.tree.map(partial(read, *of), cache) for *of, cache in zip(rows, cached, strict=True)]
            stacks, slices = list(chain(*layer_runs(chunk))), _list_slices(chunk, self.gathers)
            places = [(next(n for n, s in enumerate(stacks) if s is stack), i) for stack, i, *_ in slices]
            layers = LayerList(unstack_layers(chunk), slices, cache_axes(self.config))
            x, new = layers.decode(x, context, [tree_index(local[n], i) for n, i in places], lengths)
            for n in {n for n, _ in places}:
                caches = [cache for (m, _), cache in zip(places, new, strict=True) if m == n]
                stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *caches)
                cached = [*cached[:n], jax.tree.map(partial(write, rows[n]), cached[n], stacked), *cached[n + 1 :]]
            return x, cached

        def run_virtual_stage(carry: tuple[Array, list], number: Array) -> tuple[tuple[Array, list], None]:
            branches = [partial(run_stage, kind, number) for kind in range(max(kinds) + 1)]
            index = jnp.where(mappings.rank(PIPE) == number % stages, 1 + jnp.array(kinds, jnp.int32)[number], 0)
            x, cached = run_branch("turn", index, branches, *carry)
            return (mappings.send_to_next_stage(x), cached), None

        (x, cached), _ = jax.lax.scan(run_virtual_stage, vary_over_pipe((x, cached)), jnp.arange(len(kinds)))
        return mappings.broadcast_from_first_stage(x), cached


# --- On the devices ---------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """State of the loop from token to token.

    Attributes:
      tokens: int32 [b, S], prompts and their continuations.
      lengths: int32 [b], number of valid tokens.
      ended: bool [b].
      at_eod: bool [b], ended because the model ended the document.
      logits: [b, v], of the token at position `lengths`.
      cached: the model's cache.
    """

    tokens: Array
    lengths: Array
    ended: Array
    at_eod: Array
    logits: Array
    cached: Cache


NO_TOKEN, END = -2, -1  # instead of a token: the text had ended before, or ends now


def _prefill(config: Config, layout: Layout, slots: int, weights: CausalModel, prompts: Array, lengths: Array):
    """Inside `shard_map`: the `_State` after the prompts."""
    layers = list_layers(config, layout, weights)
    logits, cached = decoding.prefill(weights, prompts, lengths, slots, layers, config.context_attention)
    tokens = jnp.pad(prompts, [(0, 0), (0, slots - prompts.shape[1])])
    none_ended = jnp.zeros(lengths.shape, bool)
    return _State(tokens, lengths, none_ended, none_ended, logits, cached)


def _decode(
    config: Config, layout: Layout, weights: CausalModel, request: dict[str, Array], state: _State, steps: Array
) -> tuple[_State, Int[Array, " b"]]:
    """Inside `shard_map`: take up to `steps` steps, until all sequences have ended.

    Returns:
      The state, and for each sequence the last token that was written, END or NO_TOKEN.
    """
    layers, sequences = list_layers(config, layout, weights), jnp.arange(state.lengths.shape[0])

    def step(carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
        state, _, left = carry
        sampled = sample_tokens(state.logits, state.lengths, config.model.vocabulary, request)
        at_eod = state.at_eod | (~state.ended & (sampled[:, None] == request["eod"]).any(-1))
        grows = ~state.ended & ~at_eod
        is_next = jnp.arange(state.tokens.shape[1]) == state.lengths[:, None]
        tokens = jnp.where(is_next & grows[:, None], sampled[:, None], state.tokens)
        lengths = state.lengths + grows
        # A sequence that has ended reads its last token again, so that every index is in range; the result is not used.
        logits, cached = decoding.decode(weights, tokens[sequences, lengths - 1], state.cached, lengths - 1, layers)
        written = jnp.where(grows, sampled, jnp.where(state.ended, NO_TOKEN, END))
        ended = at_eod | (lengths >= request["limits"])
        return _State(tokens, lengths, ended, at_eod, logits, cached), written, left - 1

    start = state, jnp.full_like(state.lengths, NO_TOKEN), steps
    return jax.lax.while_loop(lambda carry: ~carry[0].ended.all() & (carry[2] > 0), step, start)[:2]


Program = Literal["logits", "log_probs", "hidden_states", "attention_weights"]


def _read(
    config: Config, layout: Layout, program: Program, weights: CausalModel, ids: Array, lengths: Array
) -> Float[Array, "b s ..."]:
    """Inside `shard_map`: an array of whole texts, replicated; of single layers without a pipeline.

    logits [b, s, v]; log_probs of the next id [b, s]; hidden_states before the first layer and after each
    [b, s, l + 1, h]; attention_weights of each layer's heads [b, s, l, n, s].

    Raises:
      UsageError: a layer has no `Attention`.
    """
    layers, model = list_layers(config, layout, weights), config.model
    if program in ("logits", "log_probs"):
        whole = jnp.full(len(ids), ids.shape[1])
        x, tokens, _ = decoding.run_layers(weights, ids, whole, ids.shape[1], layers, config.context_attention)
        rows = weights.logits(x, tokens)
        if program == "log_probs":
            labels = jnp.roll(ids, -1, axis=1)[:, tokens.position_ids()]
            return _gather_texts(-vocab_parallel_cross_entropy(rows, labels.reshape(-1)), tokens)
        return _gather_texts(mappings.all_gather_invariant(rows, MODEL, -1), tokens)[..., : model.vocabulary]
    padding = None if model.causal else (jnp.arange(ids.shape[1]) >= lengths[:, None]).astype(jnp.int32)
    x, context = decoding.embed_texts(weights, ids, config.context_attention, padding)
    arrays = [x] if program == "hidden_states" else []
    for layer, (_, _, gather, kind) in zip(layers.layers, layers.slices, strict=True):
        block, of_layer = layer if gather is None else gather(layer), replace(context, kind=kind)
        if program == "hidden_states":
            x, _ = split_sums(block(x, of_layer))
            arrays.append(x)
            continue
        if not (isinstance(block, Block) and isinstance(block.attention, Attention)):
            layer = f"{type(block).__name__} of {model.title} is none; use mjax.hidden_states"
            raise UsageError(f"mjax.attention_weights needs layers of the class Block with an Attention; {layer}")
        attend = partial(_attend_and_record, arrays, block.attention)
        x, _ = split_sums(block(x, of_layer, attend))
    rows = jnp.stack(arrays, 1)
    if program == "attention_weights":
        rows = mappings.all_gather_invariant(rows, MODEL, 2)
    return _gather_texts(rows, context.tokens)


def _gather_texts(rows: Shaped[Array, " bs *dims"], tokens: TokenLayout) -> Shaped[Array, "b S *dims"]:
    """The rows of whole texts, replicated over `context`, from this rank's positions."""
    return tokens.gather_positions(tokens.split_sequences(rows), mappings.all_gather_invariant)


def _attend_and_record(arrays: list[Array], attention: Attention, x: Array, context: ForwardContext) -> Array:
    arrays.append(attention.probabilities(x, context))
    return attention(x, context)


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt.

    Attributes:
      tokens: ids, without the prompt and without the end of document.
      ended: why it stopped: end of document (`eod`), all tokens generated (`tokens`), or the model's sequence length
        (`positions`).
    """

    tokens: list[int]
    ended: Literal["eod", "tokens", "positions"]


class PreparedWeights(NamedTuple):
    """Weights of inference, from `Generator.prepare`; the master weights are no longer needed."""

    weights: CausalModel


Texts = Sequence[Sequence[int]]  # token ids
TokenCallback = Callable[[int, int, int | None], None]
MIN_WIDTH = 16  # positions


class Generator:
    """The compiled program that continues prompts, with any weights of one config.

    Attributes:
      config: as it was given.
      layout: of the weights on the mesh.
      abstract_model: the model of ShapeDtypeStructs with shardings: the target for restoring weights.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Nothing is compiled or allocated before `generate`.

        Args:
          config: with `model.attention` resolved to a kernel; prompts are read with it.
          mesh: of the shape `config.mesh`.
        """
        self.config = config
        self.layout = layout = build_layout(config, mesh)
        self.abstract_model = layout.abstract_model

        on_mesh = partial(jax.shard_map, mesh=mesh, check_vma=True)
        weights = weight_specs(config, layout)
        # The global cache concatenates the caches of all ranks along its first dim, for every kind of layer.
        cached = Cache(P(cache_axes(config)), P(CONTEXT) if config.context_attention else P())
        state = _State(P(), P(), P(), P(), P(), cached)

        def compile_reading(function: Callable, results: Any) -> Callable:
            def read(choice: int | Program, *arguments):
                work = partial(function, config, layout, choice)
                return on_mesh(work, in_specs=(weights, P(), P()), out_specs=results)(*arguments)

            return jax.jit(read, static_argnums=0)

        convert, write = partial(inference_weights, config, layout), partial(_decode, config, layout)
        write = on_mesh(write, in_specs=(weights, P(), state, P()), out_specs=(state, P()))
        self._weights = jax.jit(on_mesh(convert, in_specs=(layout.specs,), out_specs=weights))
        self._read, self._read_texts = compile_reading(_prefill, state), compile_reading(_read, P())
        self._write = jax.jit(write, donate_argnums=2)

    def prepare(self, model: CausalModel) -> PreparedWeights:
        """Convert master weights, as in `TrainState.model`, once for several calls."""
        return PreparedWeights(self._weights(model))

    def _prepare(self, model: CausalModel | PreparedWeights) -> CausalModel:
        return model.weights if isinstance(model, PreparedWeights) else self._weights(model)

    def generate(
        self,
        model: CausalModel | PreparedWeights,
        prompts: Texts,
        sampling: Sampling,
        eod: int | Sequence[int],
        listener: TokenCallback | None = None,
        streams: Sequence[int] | None = None,
    ) -> list[Continuation]:
        """Continue each of `prompts` until its document ends, `sampling.tokens` are generated, or positions run out.

        Args:
          model: master weights, as in `TrainState.model`, or the result of `prepare`.
          prompts: token ids; lengths may differ.
          sampling: how to choose tokens.
          eod: the end-of-document id, or several ids that end a text.
          listener: called with the index of a prompt, a position and the token sampled for it, or None if the text
            ends before it.
          streams: of noise, one of each prompt, from 0 to 2³² − 1; by default its index.

        Raises:
          UsageError: a setting is out of range; or there is no prompt, or one is empty, contains an invalid id, or
            leaves no position for a continuation.
        """
        check_bounds(sampling)
        rows, positions = self.pad(prompts, new=1), self.config.model.sequence
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        limits = np.minimum(lengths + min(sampling.tokens, positions), positions).astype(np.int32)
        request = {
            "limits": limits,
            "eod": np.atleast_1d(np.asarray(eod, np.int32)),
            "temperature": np.float32(sampling.temperature),
            "top_k": np.int32(min(sampling.top_k, self.config.model.vocabulary)),
            "top_p": np.float32(sampling.top_p),
            "seed": np.uint32(sampling.seed),
            "streams": np.asarray(range(len(prompts)) if streams is None else streams, np.uint32),
        }
        weights = self._prepare(model)
        slots = max(pad_width(self.config, limits.max(), MIN_WIDTH, widths=SLOTS), rows.shape[1])
        state = self._read(slots, weights, rows, lengths)
        if listener is None:
            state, _ = self._write(weights, request, state, np.int32(positions))
        else:
            state = self._generate_streaming(weights, request, state, lengths.tolist(), listener)
        texts = state.tokens, state.lengths, state.at_eod
        continuations = []
        for start, tokens, length, at_eod in zip(lengths, *map(np.asarray, texts), strict=True):
            written = tokens[start:length].tolist()
            complete = "tokens" if len(written) == sampling.tokens else "positions"
            continuations.append(Continuation(written, "eod" if at_eod else complete))
        return continuations

    def read(self, program: Program, model: CausalModel | PreparedWeights, texts: Texts) -> list[np.ndarray]:
        """The arrays of each of `texts`, float32 [tokens, …].

        Args:
          program: which arrays (`_read`).
          model: as for `generate`.
          texts: token ids; lengths may differ.

        Raises:
          UsageError: there is no text, or one is empty, too long, or has an invalid id; or a pipeline has the layers
            whose arrays are read.
        """
        if program in ("hidden_states", "attention_weights") and (stages := self.config.mesh.pipe) > 1:
            raise UsageError(f"mjax.{program} is not supported with --mesh.pipe {stages}; use --mesh.model instead")
        lengths = np.array(list(map(len, texts)), np.int32)
        rows = np.asarray(self._read_texts(program, self._prepare(model), self.pad(texts), lengths))
        return [row[:length].astype(np.float32) for row, length in zip(rows, lengths, strict=True)]

    def _generate_streaming(
        self, weights: CausalModel, request: dict, state: _State, positions: list[int], listener: TokenCallback
    ) -> _State:
        """Take one step after the other, and call `listener` while the devices work on the next."""
        last = None
        while True:
            state, written = self._write(weights, request, state, np.int32(1))
            tokens = [] if last is None else np.asarray(last).tolist()
            for index, token in enumerate(tokens):
                if token != NO_TOKEN:
                    listener(index, positions[index], None if token == END else token)
                    positions[index] += 1
            if tokens and max(tokens) == NO_TOKEN:
                return state
            last = written

    def pad(self, texts: Texts, new: int = 0) -> np.ndarray:
        """Texts in rows of one width, padded with zeros, which no token attends to.

        Args:
          texts: token ids; lengths may differ.
          new: positions that a continuation needs.

        Raises:
          UsageError: there is no text, or one is empty, too long, or has an invalid id.
        """
        model, most = self.config.model, self.config.model.sequence - new
        if len(texts) == 0:
            raise UsageError("there is no prompt; give one or more")
        for number, text in enumerate(texts, start=1):
            which = f"prompt {number}" if len(texts) > 1 else "the prompt"
            if len(text) == 0:
                raise UsageError(f"{which} is empty; give at least one token to continue")
            if len(text) > most:
                needs = ", one of which the continuation needs" if new else ""
                positions = f"{len(text):,} tokens and the model {model.sequence:,} positions{needs}"
                raise UsageError(f"{which} has {positions}; shorten it to {most:,} tokens or fewer")
            if not 0 <= min(text) <= max(text) < model.vocabulary:
                ids = f"token ids from {min(text)} to {max(text)}, and the model has 0 to {model.vocabulary - 1}"
                raise UsageError(f"{which} has {ids}; use the tokenizer it was trained with")
        rows = np.zeros((len(texts), pad_width(self.config, max(map(len, texts)), MIN_WIDTH)), np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        return rows
