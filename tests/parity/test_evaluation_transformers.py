"""Evaluation against torch: the same GPT-2 in `transformers` scores the same windows, read by the tasks from files."""

import json

import numpy as np
import pytest

from mjax.config import MeshConfig
from mjax.data.tokenizers import ByteTokenizer
from mjax.inference import inference_config
from mjax.interop.convert import family_of
from mjax.parallel.mesh import make_mesh
from mjax.tasks.interface import Score
from mjax.tasks.lambada import Lambada
from mjax.tasks.perplexity import Perplexity
from mjax.tasks.scoring import Scorer
from mjax.tasks.wikitext import WikiText103

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.outputs import weights_of  # noqa: E402
from tests.parity.peers import imported, perturbed  # noqa: E402

pytestmark = pytest.mark.parity

TEXTS = ["Whose woods these are I think I know", "His house is in the village", "though he will not see me here"]
VOCABULARY = ByteTokenizer.vocabulary


def _tasks(folder, positions):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "lines.jsonl").write_text(lines)
    (folder / "wiki.test.tokens").write_text(" \n = Woods = \n \n " + " , ".join(TEXTS) + " . \n")
    short = lines.replace("Whose woods these are I think", "I").replace("though he will", "")
    (folder / "words.jsonl").write_text(short)
    tokenizer = ByteTokenizer()
    return [
        WikiText103(str(folder / "wiki.test.tokens"), tokenizer, positions, 5),
        Perplexity(str(folder / "lines.jsonl"), tokenizer, positions),
        Lambada(str(folder / "words.jsonl"), tokenizer, positions),
    ]


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


@pytest.mark.parametrize("mesh", [MeshConfig(data=2, model=2), MeshConfig(pipe=2)], ids=str)
def test_metrics_of_tasks_equal_transformers(tmp_path, mesh):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    peer = perturbed(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, attn_implementation="eager")), torch)
    with torch.no_grad():  # louder, so that some guesses are right
        peer.transformer.wte.weight.mul_(4)
        peer.transformer.wte.weight[ord("e")].mul_(3)
    config, _ = imported(peer.eval(), tmp_path)
    config = inference_config(config, mesh)
    scorer = Scorer(config, make_mesh(mesh))
    weights = weights_of(peer, scorer.abstract_model, family_of(config.model), config.model)
    correct = 0
    for task in _tasks(tmp_path, 32):
        ours = [scorer.score(weights, windows) for windows in task.passes]
        theirs = [_by_torch(peer, windows) for windows in task.passes]
        for found, expected in zip(task.metrics(ours), task.metrics(theirs), strict=True):
            same = pytest.approx(expected.value, rel=2e-4) if isinstance(found.value, float) else expected.value
            assert found.value == same, found.name
        for found, expected in zip(ours, theirs, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-5)
            assert found.correct == expected.correct
            correct += found.correct
    assert correct, "no guess was right, so the argmax was not tested"
