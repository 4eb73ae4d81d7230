"""`mjax generate`: continue prompts with a run, or chat with it."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

from rich.console import Console

from mjax.checkpoint.base import restore_weights
from mjax.cluster.launch import enable_compilation_cache
from mjax.commands.arguments import GenerateArguments
from mjax.config import MeshConfig, load_user_model
from mjax.data.tokenizers import Tokenizer, stop_token_ids
from mjax.errors import UsageError, split_lines
from mjax.generation.chat import Chat, read_conversations
from mjax.generation.generate import Generator, PreparedWeights
from mjax.generation.inference import inference_config, read_run, run_tokenizer
from mjax.generation.text import Live, StreamingText, TextContinuation, continue_ids
from mjax.parallel.mesh import make_mesh

Decode, Ends = Callable[[list[int]], str], int | Sequence[int]
Conversation = tuple[list[dict[str, Any]], Any]  # messages and tools


def generate(arguments: GenerateArguments) -> None:
    """`mjax generate`: print prompts and continuations as they are generated; notices go to stderr.

    Raises:
      UsageError: a flag is out of range, the run folder lacks a config, a tokenizer or a checkpoint, or there is no
        prompt.
      RunError: the checkpoint is damaged.
    """
    copies = arguments.num_samples
    if copies > 1 and arguments.sampling.temperature == 0:
        raise UsageError(f"--num-samples {copies} with --temperature 0 is one text {copies} times; leave one out")
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system is for a conversation; add --chat, or remove it")
    enable_compilation_cache()
    load_user_model(arguments.config, arguments.run, partial(print, file=sys.stderr))
    if arguments.chat:
        return _chat(arguments)
    prompts = _prompts(arguments)
    writer = Writer(arguments)
    encoded = [writer.tokenizer.encode_prompt(prompt) for prompt in prompts]
    writer.write(prompts, encoded, prompts, writer.tokenizer.decode, writer.ends)


class Writer:
    """A run that continues prompts, and prints what it writes; its weights are read for the first of them.

    Attributes:
      tokenizer: of the run.
      ends: ids that end a text.
    """

    def __init__(self, arguments: GenerateArguments):
        """Open the run; `arguments` are checked."""
        self.arguments, self.notices = arguments, Console(stderr=True, highlight=False)
        run = arguments.run
        saved = read_run(run, True, "which generates no text")
        self._config = inference_config(saved, MeshConfig(model=arguments.model_parallel), compute=arguments.compute)
        self.tokenizer: Tokenizer = run_tokenizer(run, self._config.model, arguments.tokenizer)
        self.ends = stop_token_ids(run / "tokenizer", self.tokenizer.eod, arguments.tokenizer)

    @cached_property
    def _restored(self) -> tuple[Generator, int, PreparedWeights]:
        """The generator, the step of the checkpoint, and its weights."""
        generator, arguments = Generator(self._config, make_mesh(self._config.mesh)), self.arguments
        notify = partial(self.notices.print, markup=False)
        step, model = restore_weights(arguments.run, generator.abstract_model, arguments.step, notify)
        return generator, step, generator.prepare(model)

    def write(
        self, prompts: Sequence[str], encoded: Sequence[list[int]], titles: Sequence[str], decode: Decode, ends: Ends
    ) -> list[TextContinuation]:
        """Continue each prompt --num-samples times and print it after its title, or as JSON.

        Other arguments as in `continue_ids`.
        """
        sampling, as_json, copies = self.arguments.sampling, self.arguments.json, range(self.arguments.num_samples)
        prompts, encoded, titles = ([text for text in texts for _ in copies] for texts in (prompts, encoded, titles))
        live, (generator, step, model) = Live(Console(), titles), self._restored
        with self.notices.status(f"checkpoint {step}: writing up to {sampling.tokens} tokens") as status:

            def watch(texts: list[StreamingText]) -> None:
                status.stop()
                live.show(texts)

            callback = None if as_json else watch
            samples = continue_ids(generator, model, decode, prompts, encoded, sampling, ends, callback)
        for number, sample in enumerate(samples, start=1):
            if as_json:
                print(json.dumps({"step": step, **dataclasses.asdict(sample)}))
            if sample.ended == "positions":
                reason = f"because the model has {sample.prompt_tokens + sample.tokens} positions"
                written = f"{sample.tokens} of {sampling.tokens} tokens"
                self.notices.print(f"prompt {number}: stopped after {written}, {reason}")
        return samples


def _prompts(arguments: GenerateArguments) -> list[str]:
    """Yield the prompts of the command line, with the lines of stdin instead of -."""
    prompts = []
    for prompt in arguments.prompt or (() if _is_terminal() else ("-",)):
        prompts += [line for line in split_lines(_stdin()) if line.strip()] if prompt == "-" else [prompt]
    if not prompts:
        raise UsageError("there is no prompt; add --prompt TEXT, or write one a line to stdin")
    return prompts


def _stdin() -> str:
    """The text of stdin; empty if it is closed."""
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 ({error}); convert it, or give --prompt TEXT") from None


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


# --- Chat -------------------------------------------------------------------------------------------------------------


def _chat(arguments: GenerateArguments) -> None:
    """`mjax generate --chat`."""
    conversations, questions = _read_chat(arguments)
    writer = Writer(arguments)
    chat = Chat(arguments.run / "tokenizer", writer.tokenizer)

    def write(conversations: Sequence[Conversation], titles: Sequence[str]) -> list[TextContinuation]:
        texts = [chat.render([*history, *messages], tools) for messages, tools in conversations]
        return writer.write(texts, [chat.encode(text) for text in texts], titles, chat.decode, chat.stops)

    history = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    if conversations:
        several = len(conversations) > 1
        write(conversations, [f"{messages[-1].get('content')}\n" if several else "" for messages, _ in conversations])
        return
    for question in filter(str.strip, questions):
        history.append({"role": "user", "content": question})
        (answer,) = write([([], None)], [""])
        history.append({"role": "assistant", "content": answer.continuation})


def _read_chat(arguments: GenerateArguments) -> tuple[list[Conversation], Iterable[str]]:
    """Conversations to answer, each with its tools, or the questions of one: of --prompt, of stdin, or typed."""
    prompts = _prompts(arguments) if arguments.prompt else []
    on_terminal = not prompts and _is_terminal()
    stdin = "" if prompts or on_terminal else _stdin()
    conversations = [([{"role": "user", "content": text}], None) for text in prompts]
    if stdin.lstrip()[:1] in ("[", "{"):
        conversations = read_conversations(stdin)
    if not (prompts or on_terminal or stdin.strip()):
        raise UsageError("there is no question; add --prompt TEXT, or write one a line to stdin")
    if arguments.num_samples > 1 and not conversations:
        raise UsageError(f"--num-samples {arguments.num_samples} gives a conversation several answers; add --prompt")
    return conversations, _read_questions() if on_terminal else split_lines(stdin)


def _read_questions():
    """Questions typed on a terminal, until it ends."""
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print()
