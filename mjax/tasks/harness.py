"""mjax models in EleutherAI's lm-evaluation-harness: any of its tasks on a run folder.

    mjax lm-eval --run runs/gpt_345m --tasks hellaswag,arc_easy

The harness calls three methods of a model:

    loglikelihood          windows of context and continuation, of which the continuation counts ──▶ `Scorer`
    loglikelihood_rolling  a text in adjacent windows, each token counted once                   ──▶ `Scorer`
    generate_until         a prompt continued, cut at the first stop sequence                     ──▶ `Generator`

So they run on the mesh of training. Choices that the harness leaves to a model follow its model `hf`. A text is encoded
together with its context and split where the context's tokens end. Inputs that are too long are truncated on the left.
The token `bos` precedes every text. Without `bos` the end-of-document id precedes a text without context.

This module needs the package lm-eval; `mjax lm-eval` reports it if it is missing.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from mjax.checkpoint.base import restore_weights
from mjax.config import Config, MeshConfig, load_user_model
from mjax.data.tokenizers import stop_token_ids
from mjax.errors import UsageError
from mjax.generation.chat import Chat
from mjax.generation.generate import Generator, Sampling
from mjax.generation.inference import inference_config, read_run, run_tokenizer
from mjax.generation.text import decode_suffix
from mjax.parallel.mesh import make_mesh
from mjax.run.loop import Run
from mjax.step.layout import with_kernel
from mjax.tasks.interface import CAUSAL_ONLY, ContextWindow
from mjax.tasks.scoring import Scorer
from mjax.utils.files import resolve_parents

SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
DEFAULT_MAX_TOKENS = 256  # of a generation, as in the harness's other models
Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (key of the harness's cache), context, continuation


class HarnessModel(TemplateLM):
    """`--model mjax`.

    Args (`--model_args run=runs/x,model=8`):
      run: its folder; checkpoint is the same.
      config: the file of a user-defined model.
      step: checkpoint to use; by default the newest intact one.
      pipe, data, context, model: the mesh, which may differ from training.
      compute: bf16, fp16 or fp32; by default as in training.
      attention: the kernel, as in training.
      batch_size: sequences per forward pass of a data-parallel replica (`--batch_size`); auto: as in training.
      tokenizer: KIND:FILE, for a run that has none.
      seed: determines sampled answers.
      device: ignored; the harness always passes one, and the mesh has its devices.

    Raises:
      UsageError: an argument is invalid, or the run folder lacks a config, a tokenizer or a checkpoint.
      RunError: the checkpoint is damaged.
    """

    quiet = False

    def __init__(
        self,
        run: str | None = None,
        step: int | None = None,
        compute: str | None = None,
        attention: str = "auto",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        checkpoint: str | None = None,
        tokenizer: str | None = None,
        config: str | None = None,
        seed: int = 0,
        **mesh: int,
    ):
        super().__init__()
        if (folder := run or checkpoint) is None:
            raise UsageError("--model mjax needs a run; add --run runs/NAME, or run=runs/NAME to --model_args")
        if max_batch_size is not None:
            raise UsageError(f"--max_batch_size {max_batch_size} is not supported by --model mjax; use --batch_size")
        run = resolve_parents(Path(folder))
        load_user_model(config, run, tqdm.write)
        saved = read_run(run, *CAUSAL_ONLY)
        if compute not in (None, "bf16", "fp16", "fp32"):
            raise UsageError(f"compute={compute} in --model_args is not a supported dtype; use bf16, fp16 or fp32")
        micro_batch = None if batch_size == "auto" else int(batch_size)
        shape = inference_config(saved, MeshConfig(**mesh), attention, micro_batch, compute)
        self._prepare(run, with_kernel(shape, tqdm.write), make_mesh(shape.mesh), tokenizer, seed)
        self.step, self.weights = restore_weights(run, self.scorer.abstract_model, step, tqdm.write)

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """The model of a run that trains, on its mesh; set `weights` before each use.

        Raises:
          UsageError: the run has no tokenizer, or its model predicts no next token.
        """
        if not run.config.model.causal:
            raise UsageError(f"{run.folder} trains {run.config.model.title}, {CAUSAL_ONLY[1]}; leave out lm-eval tasks")
        model = cls.__new__(cls)
        TemplateLM.__init__(model)
        model.quiet = True  # the run has a progress line
        model._prepare(run.folder, run.config, run.mesh)
        return model

    def _prepare(self, run: Path, config: Config, mesh: Mesh, tokenizer: str | None = None, seed: int = 0) -> None:
        self.run, self.config, self.seed, self._chat = run, config, seed, None
        self.text = run_tokenizer(run, config.model, tokenizer, "tokenizer=KIND:FILES in --model_args")
        self.stop_ids = stop_token_ids(run / "tokenizer", self.text.eod, tokenizer)
        self.scorer, self.generator = Scorer(config, mesh), Generator(config, mesh)

    # --- Tokenizer interface of the harness ---------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-document id."""
        return self.text.eod

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without context."""
        return self.text.prefix_id

    @property
    def max_length(self) -> int:
        """Sequence length of the model."""
        return self.config.model.sequence

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the harness's cache of requests."""
        return str(self.run.resolve())

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Ids of the text after `bos`, unless a chat template has already written it."""
        ids, bos = list(self.text.encode(string) if self._chat is None else self._chat.encode(string)), self.text.bos
        has_bos = bos is None or add_special_tokens is False or (self._chat is not None and ids[:1] == [bos])
        return ids if has_bos else [bos, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """`--apply_chat_template`: the template of the run; None without the flag.

        Raises:
          UsageError: it has none, or a name was given and it has one without.
        """
        if chat_template in (False, None):
            return None
        if isinstance(chat_template, str):
            problem = f"--apply_chat_template {chat_template}: {self.run} has one template, without a name"
            raise UsageError(f"{problem}; leave {chat_template} out")
        self._chat = Chat(self.run / "tokenizer", self.text, "--apply_chat_template")
        return self._chat.file.read_text(encoding="utf-8")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to the beginning of the answer, or to the end of its last message."""
        return self._chat.render(chat_history, goes_on=not add_generation_prompt)

    # --- Model interface of the harness -------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm=False, **_) -> list[tuple[float, bool]]:
        windows = [self._window(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(windows), disable=disable_tqdm or self.quiet, desc="loglikelihood", unit="window") as bar:
            scores = self.scorer.score_each(self.weights, windows, bar.update)
        answers = [(-score.loss, score.all_correct == 1) for score in scores]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in nats; every token is predicted, the first one after
        `prefix_token_id`."""
        windows, request_indices = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                request_indices.append(index)
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        nats = np.bincount(request_indices, [loglikelihood for loglikelihood, _ in answers], len(requests)).tolist()
        for request, loglikelihood in zip(requests, nats, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, loglikelihood)
        return nats

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt up to its first stop sequence, the end of the document or the token limit."""
        # Requests with the same settings together, longest prompts first, so that prompts in a batch have similar
        # lengths.
        streams = _noise_streams([request.args[0] for request in requests])
        arguments = [(*request.args, stream) for request, stream in zip(requests, streams, strict=True)]
        collator = Collator(arguments, lambda args: -len(args[0]), lambda args: args[1], group_by="gen_kwargs")
        texts, size, weights = [], self.config.train.global_batch, self.generator.prepare(self.weights)
        with tqdm(total=len(requests), disable=disable_tqdm or self.quiet, desc="generate_until", unit="prompt") as bar:
            for batch in collator.get_batched(n=size):
                sampling, until = self._read_gen_kwargs(batch[0][1])
                max_prompt = self.max_length - sampling.tokens
                prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-max_prompt:] for text, *_ in batch]
                rows = np.arange(size) % len(prompts)  # the same program for all batches
                padded, noise = [prompts[row] for row in rows], [batch[row][2] for row in rows]
                results = self.generator.generate(weights, padded, sampling, self.stop_ids, streams=noise)
                for (*args, _), prompt, continuation in zip(batch, prompts, results, strict=False):
                    text = decode_suffix(self.text.decode, prompt, continuation.tokens)
                    texts.append(postprocess_generated_text(text, until, None))
                    self.cache_hook.add_partial("generate_until", tuple(args), texts[-1])
                bar.update(len(batch))
        return collator.get_original(texts)

    def _read_gen_kwargs(self, gen_kwargs: dict[str, Any]) -> tuple[Sampling, list[str]]:
        """Sampling and stop sequences from a task's generation_kwargs."""
        settings = dict(normalize_gen_kwargs(gen_kwargs, DEFAULT_MAX_TOKENS))
        until = handle_stop_sequences(settings.pop("until", None), eos=None)
        tokens, samples = settings.pop("max_gen_toks"), settings.pop("do_sample", False)
        temperature, top_k, top_p = (settings.pop(name, default) for name, default in SAMPLING_DEFAULTS.items())
        if settings:
            known = f"do_sample, {', '.join(SAMPLING_DEFAULTS)}, until and max_gen_toks"
            raise UsageError(f"the task sets {', '.join(settings)} for generation; use --gen_kwargs with {known}")
        if tokens >= self.max_length:
            counts = f"{tokens} new tokens and {self.run} has {self.max_length} positions"
            raise UsageError(f"the task asks for {counts}; use --gen_kwargs max_gen_toks={self.max_length // 2}")
        return Sampling(tokens, temperature if samples else 0.0, top_k, top_p, self.seed), until

    def _window(self, context: list[int], continuation: list[int]) -> ContextWindow:
        """The continuation, which counts, after its context."""
        if len(continuation) > self.max_length:
            counts = f"{len(continuation):,} tokens and {self.run} has {self.max_length:,} positions"
            raise UsageError(f"a continuation has {counts}; leave out this task, or use a longer model")
        return ContextWindow.from_context(context, continuation, self.max_length)


def _noise_streams(texts: Sequence[str]) -> list[int]:
    """A noise stream for each request, from its text and the number of earlier requests with this text.

    The harness repeats a request as often as a task samples it. Repeats of a text never share a stream: CRC-32 is
    one-to-one in the four bytes after the text.
    """
    counts, streams = Counter(), []
    for text in texts:
        streams.append(zlib.crc32(counts[text].to_bytes(4), zlib.crc32(text.encode())))
        counts[text] += 1
    return streams
