"""Tokens per second of `mjax generate` and of transformers' `generate`: one Llama of random weights, greedy, in turns.

    python benchmarks/generation.py [--batch 1 8 32] [--prompt 64 512] [--compute fp32] [--tokens 64] [--rounds 3]

All contenders have the same weights: initialized by transformers, imported by `mjax convert from-hf`. The prefill is
the time of one token, the decode the time of N + 1 tokens less that. Each row has the median of the rounds. A ratio is
mjax over the faster cache of transformers, by the median of the rounds' ratios; the goal is 1.5. `hf bytes/s` of the
decode: the weights and the filled cache, read once per token, over its time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import metadata
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Figure, check_counts, check_peers, collect, in_one_sentence
from mjax.errors import RunError

GOAL = 1.5
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""44 million parameters."""
Contender = Callable[[np.ndarray, int], np.ndarray]
"""(prompts [b, s], tokens) → the continuations [b, tokens]."""


def by_mjax(run: Path, compute: str) -> Contender:
    """The generator of `mjax generate`."""
    from mjax.generation.generate import Generator, Sampling
    from mjax.generation.inference import inference_config, open_run

    opened = open_run(run)
    generator = Generator(inference_config(opened.config, opened.shape, compute=compute), opened.mesh)
    weights = generator.prepare(opened.weights_for(generator.abstract_model))

    def contend(prompts: np.ndarray, tokens: int) -> np.ndarray:
        sampling = Sampling(tokens=tokens, temperature=0)
        return np.array([text.tokens for text in generator.generate(weights, prompts.tolist(), sampling, eod=-1)])

    return contend


def by_transformers(folder: Path, compute: str, cache: str) -> Contender:
    """`generate` of transformers with a kind of cache."""
    import torch
    import transformers

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[compute]
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    settings = {"do_sample": False, "cache_implementation": cache, "pad_token_id": 0}

    def contend(prompts: np.ndarray, tokens: int) -> np.ndarray:
        ids = torch.from_numpy(prompts)
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            texts = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **settings)
        return texts[:, prompts.shape[1] :].numpy()

    return contend


def timed(contend: Contender, prompts: np.ndarray, tokens: int) -> tuple[float, np.ndarray]:
    """Seconds, and the continuations."""
    began = time.perf_counter()
    texts = contend(prompts, tokens)
    return time.perf_counter() - began, texts


def measure(contenders: dict[str, Contender], prompts: np.ndarray, tokens: int, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of prefill and of decode of each contender, [rounds, 2], and of its first call in row 0."""
    seconds, written = {name: [] for name in contenders}, {}
    for number in range(rounds + 1):
        for name in list(contenders) if number % 2 else reversed(contenders):
            prefill, _ = timed(contenders[name], prompts, 1)
            whole, written[name] = timed(contenders[name], prompts, tokens + 1)
            seconds[name].append((prefill, whole - prefill if number else whole))
    first, *others = written.values()
    for other in others:
        if (same := float((first == other).mean())) < 0.5:
            raise RunError(f"the contenders agree on {same:.0%} of the tokens, so they are not the same model")
    return {name: np.array(rows) for name, rows in seconds.items()}


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="(default: 1 8 32)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 512], help="tokens (default: 64 512)")
    parser.add_argument("--compute", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="(default: fp32)")
    parser.add_argument("--tokens", type=int, default=64, help="to generate after the first (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    arguments = parser.parse_args()
    check_counts(arguments, "batch", "prompt", "tokens", "rounds")
    check_peers("torch", "transformers")
    import torch
    import transformers

    from mjax.commands import cli

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder, run = Path(place) / "hf", Path(place) / "run"
        peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
        peer.save_pretrained(folder)
        count = sum(weight.numel() for weight in peer.parameters())
        with redirect_stdout(sys.stderr):
            if code := cli.main(["convert", "from-hf", str(folder), str(run)]):
                return code
        versions = (f"{name} {metadata.version(name)}" for name in ("jax", "torch", "transformers"))
        print(f"{count / 1e6:.1f}M parameters; {', '.join(versions)}; {torch.get_num_threads()} threads")
        print("| dtype | batch | prompt | contender | first s | prefill s | decode tokens/s | all tokens/s | GB/s |")
        print("|---|---:|---:|---|---:|---:|---:|---:|---:|")
        for compute in arguments.compute:
            contenders = {
                "mjax": by_mjax(run, compute),
                **{f"hf {cache}": by_transformers(folder, compute, cache) for cache in ("dynamic", "static")},
            }
            for batch, prompt in product(arguments.batch, arguments.prompt):
                prompts = np.random.default_rng(0).integers(3, LLAMA["vocab_size"], (batch, prompt))
                seconds = measure(contenders, prompts, arguments.tokens, arguments.rounds)
                report(f"{compute} | {batch} | {prompt}", seconds, batch, prompt, arguments.tokens, compute, count)
    return 0


def report(cell: str, seconds: dict, batch: int, prompt: int, tokens: int, compute: str, count: int) -> None:
    """Print the rows of a cell, and mjax over the faster of the others."""
    width = LLAMA["num_key_value_heads"] * LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    cache = 2 * LLAMA["num_hidden_layers"] * width * batch * (prompt + tokens / 2)
    for name, rows in seconds.items():
        prefill, decode = np.median(rows[1:], 0)
        moved = (count + cache) * {"fp32": 4, "bf16": 2}[compute] * tokens / decode / 1e9
        rates = f"{batch * tokens / decode:,.1f} | {batch * (tokens + 1) / (prefill + decode):,.1f} | {moved:.1f}"
        print(f"| {cell} | {name} | {rows[0].sum():.1f} | {prefill:.3f} | {rates} |")
    others = [rows[1:] for name, rows in seconds.items() if name != "mjax"]
    ratios = []
    for pick in (lambda rows: rows[:, 0], lambda rows: rows[:, 1], lambda rows: rows.sum(1)):
        fastest = np.min([pick(rows) for rows in others], 0)
        ratios.append(statistics.median(fastest / pick(seconds["mjax"][1:])))
    shown = " | ".join(f"**{ratio:.2f}**" for ratio in ratios)
    print(f"| {cell} | ratio | | {shown} | {'reached' if ratios[2] >= GOAL else f'below {GOAL}'} |", flush=True)
    number = f"generation_{batch}_{prompt}" if compute == "fp32" else ""
    line = f"generation, {compute}, batch {batch}, prompt {prompt}"
    collect(Figure(line, ratios[2], "× transformers' speed", GOAL, True, number))


if __name__ == "__main__":
    sys.exit(main())
