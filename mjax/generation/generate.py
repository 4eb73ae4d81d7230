"""Text generation: continue prompts with a model, token by token, on the device.

Attention reads the keys and values of every earlier position. They do not change once computed, so they are cached, and
a new token costs one position of work instead of a whole sequence:

    prefill   all prompts in one forward pass      → logits after each prompt, cache [l, b, S, n / p, d]
    loop      draw a token from the logits; read it → logits after it, cache with one more slot

The loop is a `while_loop` inside the same `shard_map` as everything else: no token passes through Python, and it ends
as soon as every sequence has ended. The weights are split over `model` as in training, and positions over `context`:
each of its ranks reads a part of the prompts and keeps a part of the cache. Replicas along `data` do the same work, so
every process of a cluster has the result. Who wants to see the text grow is called with each token.

**Positions.** A token's slot in the cache is its position. Prompts of different lengths are padded on the right; each
sequence writes its next token over its own padding (`CausalModel.prefill` says why padding is never read).

**Compilation.** Widths of prompts and of the cache are rounded up to powers of two, and everything else about a request
is an argument, so a second request of similar size compiles nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.text import Text

from mjax.config import Config, MeshConfig
from mjax.config.bounds import check_bounds
from mjax.config.kernels import position_unit
from mjax.data.sources import TrainingData
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.errors import UsageError, in_python
from mjax.generation.inference import OpenRun, ends_of_text, inference_config, open_run, read_run, run_tokenizer
from mjax.generation.sampling import Sampling, draw
from mjax.generation.streaming import Decode, Streamed, written_after
from mjax.models.block import decode_blocks, map_layers
from mjax.models.causal import Cache, CausalModel, DecodeBlocks
from mjax.parallel.pipeline import pipeline_decode
from mjax.parallel.zero import gather_for_inference, layer_gather
from mjax.run.loop import Run
from mjax.step.layout import lay_out
from mjax.step.precision import COMPUTE_TYPES
from mjax.step.train_state import TrainState

# --- On the devices ---------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """The loop's carry.

    Attributes:
      tokens: int32 [b, S], prompts and their continuations.
      lengths: int32 [b], number of valid tokens.
      ended: bool [b].
      at_eod: bool [b], ended because the model ended the document.
      logits: [b, v], of the token at position `lengths`.
      cached: what the model has read.
    """

    tokens: Array
    lengths: Array
    ended: Array
    at_eod: Array
    logits: Array
    cached: Cache


def _decoder(config: Config, plan, model: CausalModel) -> tuple[CausalModel, DecodeBlocks]:
    """Inside `shard_map`: the weights to compute with, and what runs their layers, also over stages of a pipeline."""
    mesh, dtype = config.mesh, COMPUTE_TYPES[config.precision.compute]
    gathered = map_layers(lambda stack: layer_gather(stack, dtype, inference=True), plan.blocks)
    layers = partial(decode_blocks, weights_of=gathered)

    def decode(blocks, x, context, cached, lengths):
        if mesh.pipe == 1:
            return layers(blocks, x, context, cached, lengths)
        stage = lambda chunk, x, cached: layers(chunk, x, context, cached, lengths)  # noqa: E731
        return pipeline_decode(mesh.pipe, mesh.chunks, stage, blocks, x, cached)

    return gather_for_inference(model, plan, dtype), decode  # once, outside the loop


def _generate(
    config: Config, plan, slots: int, model: CausalModel, request: dict[str, Array], hear: Callable | None = None
) -> tuple[Array, Array, Array]:
    """Inside `shard_map`: tokens int32 [b, slots], lengths int32 [b], and whether each ended at eod, bool [b].

    `hear` is called on the host by each device, with every step's positions, tokens, and whether they count: [b] each.
    """
    weights, decode = _decoder(config, plan, model)
    prompts, lengths, eod = request["prompts"], request["lengths"], request["eod"]
    sequences = jnp.arange(prompts.shape[0])

    def step(state: _State) -> _State:
        settings = {name: request[name] for name in ("temperature", "top_k", "top_p", "seed")}
        drawn = draw(state.logits, state.lengths, config.model.vocabulary, **settings)
        at_eod = state.at_eod | (~state.ended & (drawn[:, None] == eod).any(-1))
        grows = ~state.ended & ~at_eod
        if hear is not None:
            jax.debug.callback(hear, state.lengths, drawn, grows)
        here = jnp.arange(slots) == state.lengths[:, None]
        tokens = jnp.where(here & grows[:, None], drawn[:, None], state.tokens)
        lengths = state.lengths + grows
        # A sequence that has ended reads its last token again, so that every index is in range; the result is not used.
        logits, cached = weights.decode(tokens[sequences, lengths - 1], state.cached, lengths - 1, decode)
        return _State(tokens, lengths, at_eod | (lengths >= request["limits"]), at_eod, logits, cached)

    logits, cached = weights.prefill(prompts, lengths, slots, decode, config.across)
    tokens = jnp.pad(prompts, [(0, 0), (0, slots - prompts.shape[1])])
    nobody = jnp.zeros(lengths.shape, bool)
    state = _State(tokens, lengths, nobody, nobody, logits, cached)
    state = jax.lax.while_loop(lambda state: ~state.ended.all(), step, state)
    return state.tokens, state.lengths, state.at_eod


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


Listener = Callable[[int, int, int | None], None]


class Generator:
    """The compiled program that continues prompts, with any weights of one config.

    Attributes:
      abstract_model: the model of ShapeDtypeStructs with shardings: the target for restoring weights.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Nothing is compiled or allocated before `generate`.

        Args:
          config: with `model.attention` resolved to a kernel; prompts are read with it.
          mesh: of the shape `config.mesh`.
        """
        self.config = config
        layout = lay_out(config, mesh)
        self.abstract_model = layout.abstract_model

        def program(slots: int, model: CausalModel, request: dict[str, Array], listens: bool):
            on_device = partial(_generate, config, layout.plan, slots, hear=self._hear if listens else None)
            return jax.shard_map(on_device, mesh=mesh, in_specs=(layout.specs, P()), out_specs=P(), check_vma=True)(
                model, request
            )

        def all_logits(model: CausalModel, ids: Array):
            def on_device(model, ids):
                weights, decode = _decoder(config, layout.plan, model)
                return weights.all_logits(ids, decode, config.across)

            return jax.shard_map(on_device, mesh=mesh, in_specs=(layout.specs, P()), out_specs=P(), check_vma=True)(
                model, ids
            )

        self._program = jax.jit(program, static_argnums=(0, 3))
        self._all_logits = jax.jit(all_logits)
        self._listener: Listener | None = None

    def generate(
        self,
        model: CausalModel,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        eod: int | Sequence[int],
        listener: Listener | None = None,
    ) -> list[Continuation]:
        """Continue each of `prompts` until its document ends, `sampling.tokens` are generated, or positions run out.

        Args:
          model: master weights, as in `TrainState.model`.
          prompts: token ids; lengths may differ.
          sampling: how to choose tokens.
          eod: the end-of-document id, or several ids that end a text.
          listener: called with the index of a prompt, a position and the token drawn for it, or None if the text ends
            before it; in any order, by each device, and again for a text that has ended.

        Raises:
          UsageError: a setting is out of range; or there is no prompt, or one is empty, contains an invalid id, or
            leaves no position for a continuation.
        """
        check_bounds(sampling)
        self._check_prompts(prompts)
        positions = self.config.model.sequence
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        limits = np.minimum(lengths + min(sampling.tokens, positions), positions).astype(np.int32)
        request = {
            "prompts": self._padded(prompts),
            "lengths": lengths,
            "limits": limits,
            "eod": np.atleast_1d(np.asarray(eod, np.int32)),
            "temperature": np.float32(sampling.temperature),
            "top_k": np.int32(min(sampling.top_k, self.config.model.vocabulary)),
            "top_p": np.float32(sampling.top_p),
            "seed": np.uint32(sampling.seed),
        }
        self._listener = listener
        found = self._program(self._width(limits.max()), model, request, listener is not None)
        if listener is not None:
            jax.effects_barrier()
        continuations = []
        for start, tokens, length, at_eod in zip(lengths, *map(np.asarray, found), strict=True):
            written = tokens[start:length].tolist()
            complete = "tokens" if len(written) == sampling.tokens else "positions"
            continuations.append(Continuation(written, "eod" if at_eod else complete))
        return continuations

    def logits(self, model: CausalModel, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The logits of the next token after every position of each of `texts`, float32 [tokens, vocabulary].

        Args:
          model: master weights, as in `TrainState.model`.
          texts: token ids; lengths may differ.

        Raises:
          UsageError: there is no text, or one is empty, too long, or has an invalid id.
        """
        self._check_prompts(texts, most=self.config.model.sequence)
        found = np.asarray(self._all_logits(model, self._padded(texts))).astype(np.float32)
        return [each[: len(text), : self.config.model.vocabulary] for each, text in zip(found, texts, strict=True)]

    def _hear(self, positions: Array, tokens: Array, grows: Array) -> None:
        for index, (position, token, more) in enumerate(zip(positions, tokens, grows, strict=True)):
            self._listener(index, int(position), int(token) if more else None)

    def _padded(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Texts in rows of one width, with zeros behind them, which no token sees."""
        rows = np.zeros((len(texts), self._width(max(map(len, texts)))), np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        return rows

    def _width(self, needed: int) -> int:
        """`needed` rounded up to a power of two from 16 on, and to what the mesh and the kernel of attention divide;
        limited by the number of positions."""
        unit = position_unit(self.config)
        power = 1 << (max(int(needed), 16) - 1).bit_length()
        return min(-(-power // unit) * unit, self.config.model.sequence)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], most: int | None = None) -> None:
        model = self.config.model
        most = model.sequence - 1 if most is None else most
        if not prompts:
            raise UsageError("there is no prompt; add --prompt TEXT")
        for number, prompt in enumerate(prompts, start=1):
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            if len(prompt) == 0:
                raise UsageError(f"{which} is empty; give --prompt at least one token to continue")
            if len(prompt) > most:
                needs = ", one of which the continuation needs" if most < model.sequence else ""
                raise UsageError(
                    f"{which} has {len(prompt):,} tokens and the model {model.sequence:,} positions{needs}; shorten it "
                    f"to {most:,} tokens or fewer"
                )
            if not 0 <= min(prompt) <= max(prompt) < model.vocabulary:
                raise UsageError(
                    f"{which} has token ids from {min(prompt)} to {max(prompt)}; the model has 0 to "
                    f"{model.vocabulary - 1}: use the tokenizer it was trained with"
                )


# --- As text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation, as text.

    Attributes:
      prompt: as it was given.
      continuation: the generated text.
      prompt_tokens, tokens: number of tokens of each.
      ended: as in `Continuation`.
    """

    prompt: str
    continuation: str
    prompt_tokens: int
    tokens: int
    ended: Literal["eod", "tokens", "positions"]


def continue_ids(
    generator: Generator,
    model: CausalModel,
    decode: Decode,
    prompts: Sequence[str],
    encoded: Sequence[list[int]],
    sampling: Sampling,
    eod: int | Sequence[int],
    watch: Callable[[list[Streamed]], None] | None = None,
) -> list[Sample]:
    """`Generator.generate` from ids to text.

    Args:
      decode: the text of ids.
      prompts: what the ids are encoded from.
      encoded: ids of each prompt.
      eod: the ids that end a text.
      watch: called with the texts so far, whenever a token was generated.

    Raises:
      UsageError: as in `Generator.generate`.
    """
    texts, problems, lock = [Streamed(decode, ids) for ids in encoded], [], threading.Lock()

    def listen(index: int, position: int, token: int | None) -> None:
        with lock:  # devices call from threads of their own
            if problems:
                return
            try:
                texts[index].hear(position, token)
                watch(texts)
            except BaseException as error:  # such as a closed pipe: it would end the program on the device
                problems.append(error)

    found = generator.generate(model, encoded, sampling, eod, listen if watch else None)
    if problems:
        raise problems[0]
    samples = []
    for prompt, ids, continuation, streamed in zip(prompts, encoded, found, texts, strict=True):
        text = written_after(decode, ids, continuation.tokens)
        samples.append(Sample(prompt, text, len(ids), len(continuation.tokens), continuation.ended))
        streamed.text, streamed.ended = text, True
    if watch:
        watch(texts)  # a text that ended last was not heard to end
    return samples


# --- From Python ------------------------------------------------------------------------------------------------------


@in_python()
def continuations_of(
    run: str | Path | OpenRun,
    prompts: str | Sequence[str] | None = None,
    *,
    ids: Sequence[Sequence[int]] | None = None,
    num_samples: int = 1,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    tokenizer: str | None = None,
    compute: str | None = None,
    **sampling,
) -> list[Sample] | list[Continuation]:
    """Continue texts, or the ids of texts, with a run: `mjax.generate`.

    Args:
      run: its folder, or what `open_run` returned.
      prompts: one text or several.
      ids: token ids in their place, a list for each text; no tokenizer is needed then.
      num_samples: continuations of each.
      step: checkpoint of the folder; by default the newest intact one.
      mesh: for a folder; by default one device.
      tokenizer: KIND:FILES, if the run has none.
      compute: dtype of activations and matrix products; by default as in training.
      sampling: fields of `Sampling`, such as `tokens` and `temperature`.

    Returns:
      A `Sample` for each continuation of a prompt, a `Continuation` for each of ids.

    Raises:
      UsageError: as on the command line.
    """
    if (prompts is None) == (ids is None):
        raise UsageError("give generate either prompts or ids")
    if unknown := sampling.keys() - {field.name for field in fields(Sampling)}:
        known = ", ".join(field.name for field in fields(Sampling))
        raise UsageError(f"generate has no option {min(unknown)!r}; of sampling it has {known}")
    chosen = Sampling(**sampling)
    opened, generator, weights = _opened(run, step, mesh, compute)
    if ids is not None:
        repeated = [list(map(int, text)) for text in ids for _ in range(num_samples)]
        eod = opened.tokenizer.eod if (opened.folder / "tokenizer").is_dir() else -1
        return generator.generate(weights, repeated, chosen, ends_of_text(opened.folder, eod))
    library = run_tokenizer(opened.folder, opened.config.model, tokenizer)
    prompts = (prompts,) if isinstance(prompts, str) else prompts
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    encoded = [library.prompt(prompt) for prompt in repeated]
    ends = ends_of_text(opened.folder, library.eod, tokenizer)
    return continue_ids(generator, weights, library.decode, repeated, encoded, chosen, ends)


@in_python()
def logits_of(
    run: str | Path | OpenRun,
    ids: Sequence[Sequence[int]],
    *,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    compute: str | None = None,
) -> list[np.ndarray]:
    """The logits of the next token after every position of texts, on any mesh: `mjax.logits`.

    Args:
      run: its folder, or what `open_run` returned.
      ids: token ids, a list for each text; at most the model's `sequence` of them.
      step, mesh, compute: as for `continuations_of`.

    Returns:
      For each text float32 [tokens, vocabulary].

    Raises:
      UsageError: the run has no model that predicts the next token, or it does not take these ids.
    """
    _, generator, weights = _opened(run, step, mesh, compute)
    return generator.logits(weights, [list(map(int, text)) for text in ids])


def _opened(
    run: str | Path | OpenRun, step: int | None, mesh: MeshConfig | None, compute: str | None
) -> tuple[OpenRun, Generator, CausalModel]:
    """A run, what reads and continues texts with it, and its weights for that."""
    if isinstance(run, OpenRun) and (step is not None or mesh is not None):
        raise UsageError("step and mesh of an opened run are those of open_run; leave them out")
    read_run(run.folder if isinstance(run, OpenRun) else Path(run), True, "which predicts no next token")
    opened = run if isinstance(run, OpenRun) else open_run(run, step, mesh)
    generator = Generator(inference_config(opened.config, opened.shape, compute=compute), opened.mesh)
    return opened, generator, opened.weights_for(generator.abstract_model)


def print_samples(samples: Sequence[Sample], console: Console) -> None:
    """Prompts (dim on a terminal), each followed by its continuation, with an empty line between samples."""
    for number, sample in enumerate(samples):
        if number:
            console.print()
        console.print(Text(sample.prompt, style="dim") + Text(sample.continuation), soft_wrap=True, highlight=False)


def print_sample(run: Run, state: TrainState, data: TrainingData) -> None:
    """Let a causal model that was just trained continue `log.prompt`, or the beginning of a validation sample.

    This is the `on_end` of `training.loop.train`; it prints nothing if the run has no tokenizer or `log.sample_tokens`
    is 0.
    """
    log, display = run.config.log, run.display
    if data.tokenizer is None or log.sample_tokens == 0 or not run.config.model.causal:
        return
    tokenizer = tokenizer_from_folder(data.tokenizer)
    if log.prompt is None:  # as ids: their text may spell tokens that no text encodes to
        ids = (data.validation or data.training).at(0)["tokens"][0, :8].tolist()
        prompt = tokenizer.decode(ids)
    else:
        prompt, ids = log.prompt, tokenizer.prompt(log.prompt)
    sampling = Sampling(tokens=log.sample_tokens, seed=run.config.train.seed)
    display.say("")
    generator = Generator(run.config, run.mesh)
    samples = continue_ids(generator, state.model, tokenizer.decode, [prompt], [ids], sampling, tokenizer.eod)
    print_samples(samples, display.console)
    display.say("")
