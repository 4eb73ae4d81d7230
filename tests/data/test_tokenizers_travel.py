"""A tokenizer is named once: `prepare` keeps it with the data, a run takes it along, `generate` finds it there."""

import json
import shutil

import pytest

from mjax import cli
from mjax.data.tokenizers import load_tokenizer
from tests.conftest import ROOT
from tests.data.vocabularies import NAMES, TEXTS, specs
from tests.products import one_in

CONFIG = ["--config", str(ROOT / "tests" / "tiny_config.py"), "--mesh.data", "8", "--mesh.model", "2"]
OPTIONS = ["--train.micro-batch", "1", "--train.steps", "1", "--optimizer.warmup-steps", "0", "--data.no-mock"]


@pytest.mark.parametrize("kind", one_in(3, NAMES, often=pytest.mark.ci, others=pytest.mark.all))
def test_generation_finds_the_tokenizer_of_the_data_in_the_run(tmp_path, capsys, kind):
    spec = specs(tmp_path)[kind]
    tokenizer = load_tokenizer(spec)
    lines, prefix, runs = tmp_path / "lines.jsonl", tmp_path / "data" / "corpus", tmp_path / "runs"
    lines.write_text("".join(json.dumps({"text": text * 5}) + "\n" for text in TEXTS * 3))

    assert cli.main(["prepare", str(lines), "--tokenizer", spec, "--output", str(prefix)]) == 0
    pairs = "prepare it again with --split-sentences --no-append-eod"  # what a BERT's tokenizer is most often for
    suggestion = pairs if kind.startswith("bert") else f"python train.py --config gpt_demo --data.path {prefix}"
    assert suggestion in capsys.readouterr().out
    data = ["--data.path", str(prefix), "--data.split", "50,50,0", "--model.vocabulary", "384"]  # enough for each kind
    assert cli.main(["train", *CONFIG, *OPTIONS, *data, "--runs", str(runs), "--name", "it"]) == 0

    shutil.rmtree(prefix.parent)
    capsys.readouterr()
    prompt = ["--prompt", "the best", "--tokens", "3", "--temperature", "0", "--json"]
    assert cli.main(["generate", "--checkpoint", str(runs / "it"), *prompt]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert (sample["prompt"], sample["prompt_tokens"]) == ("the best", len(tokenizer.encode("the best")))
