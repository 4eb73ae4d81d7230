"""Evaluation of a converted Mistral: `mjax evaluate` and the harness beside `transformers` on the source."""

import json
import math
import re

import numpy as np
import pytest

from mjax import cli
from tests.test_chat import bytes_with_special_tokens

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-ci")

from lm_eval.models.huggingface import HFLM  # noqa: E402

from mjax.tasks.harness import HarnessModel  # noqa: E402
from tests.parity.outputs import with_noise  # noqa: E402
from tests.parity.test_convert_llama_transformers import MODELS, SMALL  # noqa: E402
from tests.parity.test_lm_eval import instances  # noqa: E402

pytestmark = pytest.mark.parity

VOCABULARY, POSITIONS = 259, 32
PAIRS = [
    ("The quick brown fox", " jumps over"),
    ("", "It was the best of times"),
    ("def train(step):", "\n    for"),
    ("a text that is longer than the model, ", "the end é"),
    ("a", "b"),
]
TEXTS = ["Whose woods these are I think I know", "His house is in the village though", "short"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model with random weights and a tokenizer in `hf`, and its run folder in `run`."""
    place = tmp_path_factory.mktemp("evaluation")
    kind, settings = MODELS["mistral"]
    torch.manual_seed(0)
    shape = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    config = getattr(transformers, f"{kind}Config")(**{**shape, **settings})
    peer = with_noise(getattr(transformers, f"{kind}ForCausalLM")(config))
    with torch.no_grad():  # louder, so that some guesses are right
        peer.get_input_embeddings().weight.mul_(8)
    peer.save_pretrained(place / "hf")
    bytes_with_special_tokens().save(str(place / "hf" / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (place / "hf" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert cli.main(["convert", "from-hf", str(place / "hf"), str(place / "run")]) == 0
    return place


@pytest.fixture(scope="module")
def models(place):
    ours = HarnessModel(run=str(place / "run"), compute="fp32", data=2, model=2, batch_size=2)
    theirs = HFLM(
        pretrained=str(place / "hf"), device="cpu", dtype="float32", max_length=POSITIONS, attn_implementation="eager"
    )
    return ours, theirs


def test_harness_loglikelihoods_equal_transformers(models):
    for kind, arguments in (("loglikelihood", PAIRS), ("loglikelihood_rolling", [(text,) for text in TEXTS])):
        ours, theirs = (getattr(model, kind)(instances(kind, arguments), True) for model in models)
        np.testing.assert_allclose(
            [np.ravel(each)[0] for each in ours], [np.ravel(each)[0] for each in theirs], rtol=1e-5, atol=1e-4
        )
        if kind == "loglikelihood":
            assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_harness_continues_as_transformers(models):
    requests = instances("generate_until", [(text[:14], {"until": ["\n"], "max_gen_toks": 12}) for text in TEXTS])
    ours, theirs = (model.generate_until(requests, True) for model in models)
    # mjax writes special tokens out, which only a model with random weights draws.
    assert [re.sub(r"<\|im_(start|end)\|>", "", text) for text in ours] == theirs
    assert any(ours)


def test_text_ends_at_ids_of_generation_config(place, capsys):
    prompts = [word for text in TEXTS for word in ("--prompt", text[:9])]
    argv = ["generate", "--run", str(place / "run"), *prompts, "--temperature", "0", "--tokens", "6", "--json"]
    requests = instances("generate_until", [(text[:9], {"until": [], "max_gen_toks": 6}) for text in TEXTS])
    file = place / "run" / "tokenizer" / "generation_config.json"
    kept, found = file.read_text(), []
    try:
        for ends in (256, [3, *range(VOCABULARY)]):
            file.write_text(json.dumps({"eos_token_id": ends}))
            capsys.readouterr()
            assert cli.main(argv) == 0
            written = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
            answers = HarnessModel(run=str(place / "run"), compute="fp32").generate_until(requests, True)
            found.append((any(written), any(answers)))
    finally:
        file.write_text(kept)
    assert found == [(True, True), (False, False)]


def test_evaluate_perplexity_equals_transformers(place, models, capsys):
    text = "It was the best of times, it"  # one window
    (place / "text.txt").write_text(text)
    argv = ["evaluate", "--run", str(place / "run"), "--task", "perplexity", "--data", str(place / "text.txt")]
    capsys.readouterr()
    assert cli.main([*argv, "--precision.compute", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [nats] = models[1].loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), True)
    assert found["tokens"] == len(text)
    assert found["perplexity"] == pytest.approx(math.exp(-nats / len(text)), rel=1e-4)
