"""Evaluation against torch: the same GPT-2 in `transformers` scores the same windows, read by the tasks from files."""

import json

import numpy as np
import pytest

from mjax.commands.evaluate import score_task
from mjax.config import MeshConfig
from mjax.data.tokenizers import ByteTokenizer
from mjax.tasks.interface import Score
from mjax.tasks.zero_shot import Lambada, Perplexity, WikiText103

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.outputs import with_noise  # noqa: E402
from tests.parity.peers import imported  # noqa: E402

pytestmark = pytest.mark.parity

TEXTS = ["Whose woods these are I think I know", "His house is in the village", "though he will not see me here"]
SHORT = ["I know", "His house is in the village", "not see me here"]
TASKS = {
    "wikitext103": (WikiText103, "wiki.test.tokens", " \n = Woods = \n \n " + " , ".join(TEXTS) + " . \n"),
    "perplexity": (Perplexity, "lines.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)),
    "lambada": (Lambada, "words.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in SHORT)),
}


def _by_torch(peer, windows):
    total = Score()
    for tokens, counted in windows:
        ids = torch.tensor(np.asarray(tokens), dtype=torch.long)
        with torch.no_grad():
            scores = peer(ids[None, :-1]).logits[0, -counted:].double()
        labels = ids[-counted:]
        correct = scores.argmax(-1) == labels
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
        total += Score(loss.item(), counted, int(correct.sum()), 1, int(correct.all()))
    return total


def test_metrics_of_tasks_equal_transformers(tmp_path):
    torch.manual_seed(0)
    tokenizer, shape = ByteTokenizer(), {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**shape, vocab_size=tokenizer.vocabulary, attn_implementation="eager")
    peer = with_noise(transformers.GPT2LMHeadModel(config)).eval()
    with torch.no_grad():  # louder, so that some guesses are right
        peer.transformer.wte.weight.mul_(4)
        peer.transformer.ln_f.bias.add_(10 * peer.transformer.wte.weight[ord("e")])
    imported(peer, tmp_path)
    for name, (task, file, text) in TASKS.items():
        (tmp_path / file).write_text(text)
        options = {"tokenizer": "bytes", "compute": "fp32", "mesh": MeshConfig(data=2, model=2)}
        found = score_task(tmp_path / "run", name, str(tmp_path / file), **options)
        windows = task(str(tmp_path / file), tokenizer, 32, None)
        expected = windows.metrics([_by_torch(peer, of_pass) for of_pass in windows.passes])
        assert found == pytest.approx({metric.name: metric.value for metric in expected}, rel=2e-4)
    assert found["last_token_accuracy"] > 0, "no guess was right, so the argmax was not tested"
