"""Generated text: samples of prompts, text that appears while it grows, and `mjax.generate` from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from mjax.config import MeshConfig
from mjax.data.tokenizers import stop_token_ids
from mjax.errors import UsageError, check_options, name_arguments
from mjax.generation import Sampling
from mjax.generation.generate import Continuation, Generator, PreparedWeights
from mjax.generation.inference import OpenRun, inference_config, open_run, read_run, run_tokenizer
from mjax.models.causal import CausalModel

Decode = Callable[[list[int]], str]
PREFIX_IDS = 16  # the text of a token depends on the few before it
REPLACEMENT = "\ufffd"  # the text of bytes that are no whole character


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
        """Print what is new."""
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
      prompts: what the ids are encoded from.
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
    run: str | Path | OpenRun,
    prompts: str | Sequence[str] | None = None,
    *,
    ids: Sequence[Sequence[int]] | None = None,
    num_samples: int = 1,
    step: int | None = None,
    mesh: MeshConfig | dict[str, int] | None = None,
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
      tokenizer: KIND:FILES, if the run has none.
      compute: dtype of activations and matmuls; by default as in training.
      sampling: fields of `Sampling`, such as `tokens` and `temperature`.

    Returns:
      A `TextContinuation` for each continuation of a prompt, a `Continuation` for each of ids.

    Raises:
      UsageError: as on the command line.
    """
    if (prompts is None) == (ids is None):
        raise UsageError("give generate either prompts or ids")
    known = [field.name for field in fields(Sampling)]
    check_options("generate", sampling, known)
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
    run: str | Path | OpenRun,
    ids: Sequence[Sequence[int]],
    *,
    step: int | None = None,
    mesh: MeshConfig | dict[str, int] | None = None,
    compute: str | None = None,
) -> list[np.ndarray]:
    """The logits of the next token after every position of texts, on any mesh: `mjax.logits`.

    Args:
      run: its folder, or what `open_run` returned.
      ids: token ids, a list for each text; at most as many as the model has positions.
      step, mesh, compute: as for `generate_texts`.

    Returns:
      For each text float32 [tokens, vocabulary].

    Raises:
      UsageError: the run has no model that predicts the next token, or it does not take these ids.
    """
    _, generator, weights = _open_generator(run, step, mesh, compute)
    return generator.logits(weights, [list(map(int, text)) for text in ids])


def _open_generator(
    run: str | Path | OpenRun, step: int | None, mesh: MeshConfig | dict[str, int] | None, compute: str | None
) -> tuple[OpenRun, Generator, CausalModel]:
    """A run, what reads and continues texts with it, and its weights for that."""
    if isinstance(run, OpenRun) and (step is not None or mesh is not None):
        raise UsageError("step and mesh are already set for an opened run; pass them to open_run")
    read_run(run.folder if isinstance(run, OpenRun) else Path(run), True, "which predicts no next token")
    opened = run if isinstance(run, OpenRun) else open_run(run, step, mesh)
    generator = Generator(inference_config(opened.config, opened.shape, compute=compute), opened.mesh)
    return opened, generator, opened.weights_for(generator.abstract_model)
