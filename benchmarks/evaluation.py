"""Seconds of the same evaluation by mjax and by the harness's `hf`: one Llama of random weights on a CPU, in turns.

    python benchmarks/evaluation.py [--batch 8] [--questions 64] [--documents 16] [--rounds 3]

Questions are log-likelihoods of four answers each, documents rolling log-likelihoods, both of this repository's own
text. `mjax` is the model class of `mjax lm-eval`, whose scorer `mjax evaluate` uses, too. A ratio is the median of the
rounds; the goal is 1. Results must agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import generation
from benchmarks.command import Figure, check_counts, check_peers, collect, in_one_sentence
from mjax.errors import RunError

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, POSITIONS, CHOICES = 8192, 512, 4
END = "<|endoftext|>"
LLAMA = generation.LLAMA | {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}


def write_peer(folder: Path, texts: list[str]) -> None:
    """A folder of transformers: a model of random weights, and byte pairs of these texts."""
    import tokenizers
    import torch
    import transformers

    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator(texts, VOCABULARY, special_tokens=[END])
    settings = {"eos_token": END, "bos_token": END, "add_bos_token": False}
    transformers.PreTrainedTokenizerFast(tokenizer_object=library._tokenizer, **settings).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)


def requests_of(texts: list[str], questions: int, documents: int) -> dict[str, list]:
    """Instances of the harness by the method that answers them."""
    from lm_eval.api.instance import Instance

    words, random, pairs = " ".join(texts).split(), np.random.default_rng(0), []
    for _ in range(questions):
        begin, length = random.integers(len(words) - 300), random.integers(10, 120)
        context = " ".join(words[begin : begin + length])
        for _ in range(CHOICES):
            answer = random.integers(len(words) - 20)
            pairs.append((context, " " + " ".join(words[answer : answer + random.integers(1, 12)])))
    arguments = {"loglikelihood": pairs, "loglikelihood_rolling": [(text,) for text in texts[:documents]]}
    return {
        kind: [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(of_kind)]
        for kind, of_kind in arguments.items()
    }


def first_number(answer: float | tuple[float, bool]) -> float:
    return answer[0] if isinstance(answer, tuple) else answer


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="sequences of a forward pass (default: 8)")
    parser.add_argument("--questions", type=int, default=64, help="of four answers (default: 64)")
    parser.add_argument("--documents", type=int, default=16, help="(default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    arguments = parser.parse_args()
    check_counts(arguments, "batch", "questions", "documents", "rounds")
    check_peers("torch", "transformers", "lm_eval")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lm_eval.models.huggingface import HFLM

    from mjax.commands import cli
    from mjax.tasks.harness import HarnessModel

    # hf reads the end of a document where a text spells it; mjax reads text.
    pages = sorted((ROOT / "docs").rglob("*.md"))
    texts = [page.read_text(encoding="utf-8").replace(END, "") for page in pages]
    with tempfile.TemporaryDirectory() as place:
        folder, run = Path(place) / "hf", Path(place) / "run"
        write_peer(folder, texts)
        with redirect_stdout(sys.stderr):
            if code := cli.main(["convert", "from-hf", str(folder), str(run)]):
                return code
        models = {
            "mjax": HarnessModel(str(run), compute="fp32", batch_size=arguments.batch),
            "hf": HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=arguments.batch),
        }
        versions = (f"{name} {metadata.version(name)}" for name in ("jax", "torch", "transformers", "lm_eval"))
        print(f"batch {arguments.batch}; {', '.join(versions)}; {os.cpu_count()} cores")
        print("| requests | number | mjax first s | mjax s | hf s | ratio |")
        print("|---|---:|---:|---:|---:|---:|")
        for kind, requests in requests_of(texts, arguments.questions, arguments.documents).items():
            seconds, answers = {name: [] for name in models}, {}
            for number in range(arguments.rounds + 1):  # the first compiles
                for name in list(models) if number % 2 else reversed(models):
                    began = time.perf_counter()
                    answers[name] = [first_number(one) for one in getattr(models[name], kind)(requests, True)]
                    seconds[name].append(time.perf_counter() - began)
            if not np.allclose(answers["mjax"], answers["hf"], rtol=1e-4, atol=1e-2):
                raise RunError(f"{kind}: mjax and hf disagree, so they are not the same model")
            first, *ours = seconds["mjax"]
            theirs = seconds["hf"][1:]
            ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
            medians = f"{statistics.median(ours):.2f} | {statistics.median(theirs):.2f}"
            print(f"| {kind} | {len(requests)} | {first:.2f} | {medians} | **{ratio:.2f}** |", flush=True)
            collect(Figure(f"evaluation, {kind}", ratio, "× the speed of hf in the harness", 1.0, True, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
