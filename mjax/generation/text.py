"""Generated text: samples of prompts, text that appears while it grows, and `mjax.generate` from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from mjax.checkpoint.arrays import leaves_by_path
from mjax.config import MeshConfig
from mjax.config.batch_size import with_batch_size
from mjax.data.tokenizers import stop_token_ids
from mjax.errors import UsageError, check_options, name_arguments
from mjax.generation import Sampling
from mjax.generation.generate import Continuation, Generator, PreparedWeights, Texts
from mjax.generation.inference import OpenRun, inference_config, open_run, read_run, run_tokenizer
from mjax.models.causal import CausalModel
from mjax.parallel.mesh import batch_specs
from mjax.parallel.weights import trainable_only
from mjax.step.layout import with_sequence_length
from mjax.step.step import loss_and_gradients

Decode = Callable[[list[int]], str]
PREFIX_IDS = 16  # the text of a token depends on the few before it
Run = str | Path | OpenRun
MeshShape = MeshConfig | dict[str, int] | None
REPLACEMENT = "\ufffd"  # the text of an incomplete character


def decode_suffix(decode: Decode, prompt: list[int], tokens: list[int]) -> str:
    """The text of a continuation, as `StreamingText` shows it."""
    streamed = StreamingText(decode, prompt)
    streamed.finish(tokens)
    return streamed.text


class StreamingText:
    """A continuation in the making.

    It is decoded together with the prompt, because the text of a token can depend on the previous one. For example,
    sentencepiece drops the space before the first token, and a token may hold part of a character. Byte fallback turns
    a run of bytes that ends within a character into U+FFFD altogether, so ids are only parted between whole characters.
    (`tokenizers.decoders.DecodeStream` does this for the tokenizers of that library.)

    Attributes:
      text: of the tokens so far, without an end that is not whole: a token may end within a character, which decodes
        to U+FFFD until the rest of it comes.
      ended: whether there are no more.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]):
        """`decode` returns the text of ids; the continuation follows `prompt`."""
        self._decode, self._ids, self._whole = decode, list(prompt), ""
        self._prompt = self._done = len(self._ids)  # ids whose text is whole
        # The ids from here are decoded: they begin with a whole character, and the text of those done is not empty.
        nearest = range(self._done - PREFIX_IDS, max(self._done - 2 * PREFIX_IDS, 0), -1)
        texts = ((begin, decode(self._ids[begin:])) for begin in nearest)
        self._begin = next((begin for begin, text in texts if text.strip() and REPLACEMENT not in text), 0)
        self._before = decode(self._ids[self._begin :])
        self.text, self.ended = "", False

    def add(self, token: int | None) -> None:
        """Add the next token; None: the text has ended."""
        self.ended = token is None
        self._ids += [] if token is None else [token]
        text = self._decode(self._ids[self._begin :])
        # Bytes that make no character may change the text before them, which was shown.
        new = text[len(self._before) :]
        if not text.startswith(self._before):
            new = self._decode(self._ids[self._done :])
        self.text = self._whole + (new if self.ended else new.rstrip(REPLACEMENT))
        if not new.endswith(REPLACEMENT):
            if new.strip():
                self._begin, text = self._done, self._decode(self._ids[self._done :])
            self._whole, self._done, self._before = self.text, len(self._ids), text

    def finish(self, tokens: Sequence[int]) -> None:
        """Add the tokens among all `tokens` of the text that were not added yet, and end it."""
        if not self.ended:
            for token in [*tokens[len(self._ids) - self._prompt :], None]:
                self.add(token)


class Live:
    """Prints texts one after the other, each as it grows."""

    def __init__(self, console: Console, titles: Sequence[str]):
        """`titles` are printed before the texts, dim on a terminal, and an empty line between two texts."""
        self._file, self._printed = console.file, 0
        self._titles = [f"\x1b[2m{title}\x1b[0m" if console.is_terminal and title else title for title in titles]

    def show(self, texts: Sequence[StreamingText]) -> None:
        """Print the new text."""
        whole = ""
        for number, (title, streamed) in enumerate(zip(self._titles, texts, strict=True), start=1):
            whole += title + streamed.text
            if not streamed.ended:
                break
            whole += "\n" if number == len(texts) else "\n\n"
        # Not by rich, which ends the process where the output is not read.
        self._file.write(whole[self._printed :])
        self._file.flush()
        self._printed = len(whole)


# --- As text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextContinuation:
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
    model: CausalModel | PreparedWeights,
    decode: Decode,
    prompts: Sequence[str],
    encoded: Sequence[list[int]],
    sampling: Sampling,
    eod: int | Sequence[int],
    watch: Callable[[list[StreamingText]], None] | None = None,
) -> list[TextContinuation]:
    """`Generator.generate` from ids to text.

    Args:
      decode: the text of ids.
      prompts: the texts that the ids encode.
      encoded: ids of each prompt.
      eod: the ids that end a text.
      watch: called with the texts so far, whenever a token was generated.

    Raises:
      UsageError: as in `Generator.generate`.
    """
    texts = [StreamingText(decode, ids) for ids in encoded]

    def listen(index: int, position: int, token: int | None) -> None:
        texts[index].add(token)
        watch(texts)

    continuations = generator.generate(model, encoded, sampling, eod, listen if watch else None)
    samples = []
    for prompt, ids, continuation, streamed in zip(prompts, encoded, continuations, texts, strict=True):
        streamed.finish(continuation.tokens)
        samples.append(TextContinuation(prompt, streamed.text, len(ids), len(continuation.tokens), continuation.ended))
    if watch:
        watch(texts)  # the last text to end has called no listener for its end
    return samples


# --- From Python ------------------------------------------------------------------------------------------------------


@name_arguments("step", *(field.name for field in fields(Sampling)))
def generate_texts(
    run: Run,
    prompts: str | Sequence[str] | None = None,
    *,
    ids: Texts | None = None,
    num_samples: int = 1,
    step: int | None = None,
    mesh: MeshShape = None,
    tokenizer: str | None = None,
    compute: str | None = None,
    **sampling,
) -> list[TextContinuation] | list[Continuation]:
    """Continue texts, or the ids of texts, with a run: `mjax.generate`.

    Args:
      run: its folder, or what `open_run` returned.
      prompts: one text or several.
      ids: token ids in their place, a list for each text; no tokenizer is needed then.
      num_samples: continuations of each.
      step: checkpoint of the folder; by default the newest intact one.
      mesh: for a folder; by default one device.
      tokenizer: KIND:FILES, for a run without a tokenizer.
      compute: dtype of activations and matmuls; by default as in training.
      sampling: fields of `Sampling`, such as `tokens` and `temperature`.

    Returns:
      A `TextContinuation` for each continuation of a prompt, a `Continuation` for each of ids.

    Raises:
      UsageError: as on the command line.
    """
    if (prompts is None) == (ids is None):
        raise UsageError("give generate either prompts or ids")
    check_options("generate", sampling, [field.name for field in fields(Sampling)])
    chosen = Sampling(**sampling)
    opened, generator, weights = _open_generator(run, step, mesh, compute)
    if ids is not None:
        repeated = [list(map(int, text)) for text in ids for _ in range(num_samples)]
        eod = opened.tokenizer.eod if (opened.folder / "tokenizer").is_dir() else -1
        return generator.generate(weights, repeated, chosen, stop_token_ids(opened.folder / "tokenizer", eod))
    library = run_tokenizer(opened.folder, opened.config.model, tokenizer, 'tokenizer="KIND:FILES"')
    prompts = (prompts,) if isinstance(prompts, str) else prompts
    if wrong := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise UsageError(f"prompts has {wrong[0]!r}, which is not text; give ids for token ids, a list for each text")
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    encoded = [library.encode_prompt(prompt) for prompt in repeated]
    ends = stop_token_ids(opened.folder / "tokenizer", library.eod, tokenizer)
    return continue_ids(generator, weights, library.decode, repeated, encoded, chosen, ends)


@name_arguments("step")
def compute_logits(
    run: Run, ids: Texts, *, step: int | None = None, mesh: MeshShape = None, compute: str | None = None
) -> list[np.ndarray]:
    """The logits of the next token after every position of texts, on any mesh: `mjax.logits`.

    Args:
      run: its folder, or what `open_run` returned.
      ids: token ids, a list for each text; at most as many as the model has positions.
      step, mesh, compute: as for `mjax.generate`.

    Returns:
      For each text float32 [tokens, vocabulary].

    Raises:
      UsageError: the run has no model that predicts the next token, or it does not take these ids.
    """
    _, generator, weights = _open_generator(run, step, mesh, compute)
    return generator.read("logits", weights, ids)


@name_arguments("step")
def compute_log_probs(
    run: Run, ids: Texts, *, step: int | None = None, mesh: MeshShape = None, compute: str | None = None
) -> list[np.ndarray]:
    """Each token's log-probability after the tokens before it, on any mesh: `mjax.log_probs`.

    The vocabulary stays split over `model`: no device ever holds a full row of logits.

    Args:
      run, ids, step, mesh, compute: as for `mjax.logits`.

    Returns:
      For each text float32 [tokens - 1], in nats: element i belongs to token i + 1. The first token has no probability.

    Raises:
      UsageError: as for `mjax.logits`.
    """
    _, generator, weights = _open_generator(run, step, mesh, compute)
    return [row[:-1] for row in generator.read("log_probs", weights, ids)]


@name_arguments("step")
def compute_hidden_states(
    run: Run, ids: Texts, *, step: int | None = None, mesh: MeshShape = None, compute: str | None = None
) -> list[np.ndarray]:
    """The residual stream before the first layer and after each layer: `mjax.hidden_states`.

    These are the `hidden_states` of `transformers`, with one exception: the last one comes before the final
    norm. A BERT reads each text as one segment.

    Args:
      run, ids, step, mesh, compute: as for `mjax.logits`; the run may be a BERT. Any mesh without a pipeline.

    Returns:
      For each text float32 [layers + 1, tokens, hidden], the same on every process.

    Raises:
      UsageError: as for `mjax.logits`, or the mesh has a pipeline.
    """
    _, generator, weights = _open_generator(run, step, mesh, compute, causal=False)
    return [text.swapaxes(0, 1) for text in generator.read("hidden_states", weights, ids)]


@name_arguments("step")
def compute_attention_weights(
    run: Run, ids: Texts, *, step: int | None = None, mesh: MeshShape = None, compute: str | None = None
) -> list[np.ndarray]:
    """Every head's attention weights, after the softmax: `mjax.attention_weights`.

    Args:
      run, ids, step, mesh, compute: as for `mjax.hidden_states`.

    Returns:
      For each text float32 [layers, heads, tokens, tokens], the same on every process: `[l, n, i, j]` is the weight
      with which head n of layer l attends from token i to token j. The last dim sums to 1.

    Raises:
      UsageError: as for `mjax.hidden_states`, or a layer has no attention.
    """
    _, generator, weights = _open_generator(run, step, mesh, compute, causal=False)
    texts = generator.read("attention_weights", weights, ids)
    return [text.transpose(1, 2, 0, 3)[..., : len(text)] for text in texts]


@name_arguments("step")
def compute_gradients(
    run: Run, ids: Texts, *, step: int | None = None, mesh: MeshShape = None, compute: str | None = None
) -> tuple[float, dict[str, jax.Array]]:
    """The loss of texts, and its gradient for every trained weight, without dropout: `mjax.gradients`.

    The loss is the mean cross entropy of all tokens that have a token before them, over all texts together, without a
    mixture's auxiliary losses.

    Args:
      run, ids, step, mesh, compute: as for `mjax.logits`; pipelines work too.

    Returns:
      The cross entropy in nats, and the gradients by the weight's name, such as `blocks.mlp.up.kernel`. Each has the
      shape and the sharding of the weight in `OpenRun.weights`: layers are stacked along the first dim.

    Raises:
      UsageError: as for `mjax.logits`, no text has two tokens, or the compute type is fp16, whose gradients need a
        loss scale.
    """
    opened, generator, weights = _open_generator(run, step, mesh, compute)
    config = inference_config(generator.config, opened.shape, micro_batch=1)
    if config.precision.compute == "fp16":
        raise UsageError('gradients in fp16 need a loss scale; add compute="fp32"')
    texts = [*ids, *[[0]] * (-len(ids) % config.train.global_batch)]  # those for a whole batch have no label
    rows, labels = generator.pad(texts), np.array([len(text) - 1 for text in texts])
    if not labels.any():
        raise UsageError("no text has two tokens; give at least one that has a next token")
    mask = np.arange(rows.shape[1]) < labels[:, None]
    batch = {"tokens": rows, "labels": np.roll(rows, -1, axis=1), "loss_mask": mask}
    config = with_sequence_length(with_batch_size(config, len(rows)), batch)
    layout, specs = generator.layout, batch_specs(dict.fromkeys(batch, (rows.shape[1:], "")), rows.shape[1])

    for tree in (weights, layout.plan, layout.specs):  # the auxiliary losses of a mixture would count padding
        tree.loss_weights = {name: float(name == "loss") for name in tree.loss_weights}

    def on_device(model: CausalModel, batch: dict[str, jax.Array]):
        means, gradients = loss_and_gradients(config, layout.plan, model, batch, jnp.int32(0), jnp.float32(1))
        return means["loss"], gradients

    results = jax.P(), trainable_only(layout.specs)
    program = jax.shard_map(on_device, mesh=opened.mesh, in_specs=(layout.specs, specs), out_specs=results)
    loss, gradients = jax.jit(program)(weights, batch)
    return float(loss), leaves_by_path(gradients)


def _open_generator(
    run: Run, step: int | None, mesh: MeshShape, compute: str | None, causal: bool = True
) -> tuple[OpenRun, Generator, CausalModel]:
    """A run, the programs that read and continue texts with it, and its weights for them.

    Args:
      causal: True if a BERT is rejected.
    """
    if isinstance(run, OpenRun) and (step is not None or mesh is not None):
        raise UsageError("step and mesh are already set for an opened run; pass them to open_run")
    if causal:
        read_run(run.folder if isinstance(run, OpenRun) else Path(run), True, "which predicts no next token")
    opened = run if isinstance(run, OpenRun) else open_run(run, step, mesh)
    generator = Generator(inference_config(opened.config, opened.shape, compute=compute), opened.mesh)
    return opened, generator, opened.weights_for(generator.abstract_model)
