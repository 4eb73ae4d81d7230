"""`--model mjax` in the lm-evaluation-harness, against the harness's `hf` on the export.

The model has random weights, so large that some of its guesses are right; the tasks are files written here. No text
holds `<|endoftext|>`, which ends a document for `transformers` and is text for mjax.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import mjax
from mjax.commands import cli
from mjax.config import CheckpointConfig, DataConfig, MeshConfig, PrecisionConfig, read_config
from mjax.errors import UsageError
from mjax.generation.text import decode_suffix
from mjax.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.data.vocabularies import TEXTS, gpt2_files
from tests.interop.folders import CONFIG, tensors_of, write_folder
from tests.parity.chat_tokenizers import write_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-ci")
pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")

import torch  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from mjax.tasks.harness import HarnessModel  # noqa: E402

pytestmark = pytest.mark.parity

POSITIONS = 32
PAIRS = [
    ("The quick brown fox", " jumps over"),
    ("The quick brown fox ", "jumps over"),  # the space goes to the continuation
    ("", "It was the best of times"),
    ("def train(step):", "\n    for"),
    (TEXTS[0] * 3, " the end"),  # longer than the model
    ("a", "b"),
]
LONG = [TEXTS[0] * 2, "short", TEXTS[2]]


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number, metadata=("tiny", number, 1))
        for number, each in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder `run` and its export `hf`, with a tokenizer in both."""
    place = tmp_path_factory.mktemp("harness")
    vocab, merges = gpt2_files(place)
    config = CONFIG | {"vocab_size": len(json.loads(vocab.read_text())), "n_positions": POSITIONS}
    config |= {"n_embd": 24, "n_head": 4}
    write_folder(place / "from", config, tensors_of(config))
    arguments = ["convert", "from-hf", str(place / "from"), str(place / "run"), "--tokenizer", f"gpt2:{vocab},{merges}"]
    assert cli.main(arguments) == 0
    assert cli.main(["convert", "to-hf", str(place / "run"), str(place / "hf")]) == 0
    lines = [
        {"question": question, "choices": choices, "answer": number % 2, "text": question + choices[0]}
        for number, (question, choices) in enumerate(
            [(f"The {word}", [" dog", " café"]) for word in ("quick", "brown", "lazy", "best", "worst", "end")]
        )
    ]
    (place / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "tasks").mkdir()
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {place / 'tiny.jsonl'}\ntest_split: test\n"
    (place / "tasks" / "choice.yaml").write_text(
        data + "task: tiny_choice\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ntarget_delimiter: ''\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    (place / "tasks" / "text.yaml").write_text(
        data + "task: tiny_text\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: byte_perplexity\n"
    )
    return place


@pytest.fixture(scope="module")
def ours(folder):
    return HarnessModel(str(folder / "run"), compute="fp32", batch_size=3)


@pytest.fixture(scope="module")
def theirs(folder):
    return HFLM(pretrained=str(folder / "hf"), dtype="float32", device="cpu", batch_size=2, max_length=POSITIONS)


def test_run_that_trains_is_evaluated_as_its_checkpoint(folder, fewer_devices):
    """Every four steps the metrics equal `mjax lm-eval` with the checkpoint of that step."""
    config = read_config(folder / "run" / "config.json")
    train = replace(config.train, steps=6, eval_interval=0, global_batch=4, micro_batch=2)
    config = replace(config, train=train, precision=PrecisionConfig(compute="fp32"), mesh=MeshConfig(data=2))
    config = replace(config, data=DataConfig(mock=True), checkpoint=CheckpointConfig(interval=4))
    manager = TaskManager(include_path=str(folder / "tasks"))
    harness = mjax.EvaluateWithHarness(["tiny_choice", "tiny_text"], 4, task_manager=manager)
    trainer = mjax.Trainer(config, folder / "trained", init=folder / "run", callbacks=[harness], show=False)
    assert trainer.train().exit_code == 0
    records = {record["step"]: record for record in read_metrics(folder / "trained" / "metrics.jsonl")}
    assert [step for step, record in records.items() if "val_tiny_choice_acc" in record] == [4, 6]
    for step in (4, 6):
        model = HarnessModel(str(folder / "trained"), step=step)
        found = lm_eval.simple_evaluate(model, tasks=["tiny_choice", "tiny_text"], task_manager=manager)["results"]
        assert records[step]["val_tiny_choice_acc"] == found["tiny_choice"]["acc,none"]
        expected = found["tiny_text"]["byte_perplexity,none"]
        assert records[step]["val_tiny_text_byte_perplexity"] == pytest.approx(expected, rel=1e-5)


# --- Against the harness's own model ----------------------------------------------------------------------------------


def test_loglikelihoods_equal_hf_on_export(ours, theirs):
    requests = instances("loglikelihood", PAIRS)
    found, expected = ours.loglikelihood(requests, True), theirs.loglikelihood(requests, True)
    shown = [(("", ""), [5, 6], [token]) for token in range(ours.config.model.vocabulary)]
    found, expected = (
        [*texts, *model._loglikelihood_tokens(shown, True)] for texts, model in ((found, ours), (expected, theirs))
    )
    np.testing.assert_allclose([nats for nats, _ in found], [nats for nats, _ in expected], rtol=0, atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {True, False} == {greedy for _, greedy in found}
    requests = instances("loglikelihood_rolling", [(text,) for text in LONG])
    found, expected = (model.loglikelihood_rolling(requests, True) for model in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-4)


@pytest.fixture(scope="module", params=["llama 3", "sentencepiece", "qwen"])
def with_bos(request, tmp_path_factory):
    """A model folder with a tokenizer that begins texts, or not, as transformers reads it, and its run."""
    place = tmp_path_factory.mktemp("bos")
    (place / "tokenizer").mkdir()
    vocabulary = write_tokenizer(request.param, "none", place / "tokenizer")
    config = CONFIG | {"vocab_size": vocabulary, "n_positions": POSITIONS, "n_embd": 24, "n_head": 4}
    write_folder(place / "from", config, tensors_of(config))
    shutil.copytree(place / "tokenizer", place / "from", dirs_exist_ok=True)
    assert cli.main(["convert", "from-hf", str(place / "from"), str(place / "run")]) == 0
    return place, request.param != "qwen"


def test_texts_begin_as_in_transformers(with_bos, capsys):
    """Whatever begins texts: log-likelihoods and continuations equal hf on the model itself."""
    place, begins = with_bos
    ours = HarnessModel(str(place / "run"), compute="fp32", batch_size=3)
    theirs = HFLM(pretrained=str(place / "from"), dtype="float32", device="cpu", batch_size=2, max_length=POSITIONS)
    assert (ours.text.bos is not None) == begins
    assert ours.tok_encode("The fox") == theirs.tok_encode("The fox")
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", [(text,) for text in LONG])):
        found, expected = (getattr(model, kind)(instances(kind, arguments), True) for model in (ours, theirs))
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-6, atol=1e-4)
    ids = theirs.tok_encode("The fox")
    tokens = theirs.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    expected = decode_suffix(ours.text.decode, ids, tokens[len(ids) :])
    requests = instances("generate_until", [("The fox", {"until": [], "max_gen_toks": 8})])
    assert ours.generate_until(requests, True) == [expected]
    capsys.readouterr()
    flags = ["--prompt", "The fox", "--temperature", "0", "--tokens", "8", "--json"]
    assert cli.main(["generate", "--run", str(place / "run"), *flags]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["continuation"], written["prompt_tokens"]) == (expected, len(ids))


@pytest.mark.parametrize("until", [[" the", "zz"], []])
def test_greedy_continuations_equal_hf_on_export(ours, theirs, until):
    settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
    requests = instances("generate_until", [(context or "It", settings) for context, _ in PAIRS])
    found, expected = ours.generate_until(requests, True), theirs.generate_until(requests, True)
    assert found == expected
    assert any(found)


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
)
def test_do_sample_decides_the_temperature(ours, given, temperature):
    """The harness does not sample by default, and sampling without a temperature is at 1."""
    sampling, _ = ours._read_gen_kwargs({**given, "max_gen_toks": 8})
    assert sampling.temperature == temperature
    answers = ours.generate_until(instances("generate_until", [("The fox", {**given, "max_gen_toks": 8})] * 6), True)
    assert (len(set(answers)) == 1) == (temperature == 0)


def test_sampled_answers_ignore_the_batch(folder):
    """Three repeats of five prompts, in batches of one, four and 15: each answer has its own noise."""
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    requests = instances("generate_until", [(text, settings) for text in "abcde" for _ in range(3)])

    def answers(batch_size, asked=requests, **arguments):
        model = HarnessModel(str(folder / "run"), compute="fp32", batch_size=batch_size, **arguments)
        return model.generate_until(asked, True)

    alone = answers(1)
    assert len(set(alone)) == 15
    assert answers(4) == answers(15) == alone
    assert answers(4, requests[6:9]) == alone[6:9]  # whatever else is asked
    assert not set(alone) & set(answers(4, seed=1))


def test_text_ends_at_ids_of_generation_config(folder, capsys):
    file = folder / "run" / "tokenizer" / "generation_config.json"
    argv = ["generate", "--run", str(folder / "run"), "--prompt", "It", "--temperature", "0", "--tokens", "6", "--json"]
    requests = instances("generate_until", [("It", {"until": [], "max_gen_toks": 6})])
    for ends in (0, list(range(2000))):
        file.write_text(json.dumps({"eos_token_id": ends}))
        capsys.readouterr()
        assert cli.main(argv) == 0
        tokens = json.loads(capsys.readouterr().out)["tokens"]
        (text,) = HarnessModel(str(folder / "run"), compute="fp32").generate_until(requests, True)
        assert (bool(tokens), bool(text)) == (ends == 0, ends == 0)
    file.unlink()


# --- The command ------------------------------------------------------------------------------------------------------


TASKS = ["tiny_choice", "tiny_text"]


def test_command_on_mesh_has_metrics_of_hf(folder, theirs):
    arguments = [
        *(sys.executable, "-m", "mjax", "lm-eval", "--simulate", "4", "run", "--run", str(folder / "run")),
        *("--tasks", ",".join(TASKS), "--model_args", "compute=fp32,context=2", "model=2"),
        *("--include_path", str(folder / "tasks"), "--output_path", str(folder / "results")),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "|tiny_choice|" in ran.stdout.replace(" ", "")
    (file,) = (folder / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    expected = lm_eval.simple_evaluate(theirs, tasks=TASKS, task_manager=tasks, bootstrap_iters=0)["results"]
    assert 0 < expected["tiny_choice"]["acc,none"] < 1
    for task, figure in zip(TASKS, ("acc,none", "byte_perplexity,none"), strict=True):
        assert results[task][figure] == pytest.approx(expected[task][figure], rel=1e-5)


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_batch_size": 8}, "--max_batch_size 8 is not supported"),
        ({"compute": "fp8"}, "compute=fp8 in --model_args is not a supported dtype"),
        ({"batch_size": 0}, "--train.micro-batch is 0"),
    ],
)
def test_wrong_model_arguments_are_rejected(folder, arguments, words):
    with pytest.raises(UsageError, match=words):
        HarnessModel(str(folder / "run"), **arguments)


def test_unknown_task_gets_one_sentence(folder, capsys):
    assert cli.main(["lm-eval", "--run", str(folder / "run"), "--tasks", "hellaswagg"]) == 2
    error = "mjax: error: Tasks not found: hellaswagg; `mjax lm-eval ls tasks` lists their names"
    assert capsys.readouterr().err.splitlines()[-1] == error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 4}, "the task sets num_beams for generation"),
        ({}, f"the task asks for 256 new tokens and .* has {POSITIONS} positions; use --gen_kwargs max_gen_toks=16"),
    ],
)
def test_unsupported_generation_is_rejected(ours, settings, words):
    with pytest.raises(UsageError, match=words):
        ours.generate_until(instances("generate_until", [("It", settings)]), True)


def test_continuation_longer_than_model_is_rejected(ours):
    with pytest.raises(UsageError, match=r"a continuation has 41 tokens and .* has 32 positions"):
        ours._loglikelihood_tokens([(None, [1], [2] * 41)], True)
