"""Evaluation against torch: the same GPT-2 in `transformers` scores the same windows, read by the tasks from files."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from mjax.config import MeshConfig
from mjax.data.tokenizers import ByteTokenizer
from mjax.inference import inference_config
from mjax.parallel.mesh import make_mesh
from mjax.tasks.interface import Score
from mjax.tasks.lambada import Lambada
from mjax.tasks.perplexity import Perplexity
from mjax.tasks.scoring import Scorer
from mjax.tasks.wikitext import WikiText103
from tests.parity.test_gpt2_transformers import _config, _from_peer, _model, _numpy, _peer

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")

pytestmark = pytest.mark.parity

TEXTS = ["Whose woods these are I think I know", "His house is in the village", "though he will not see me here"]


def _tasks(folder, positions):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "lines.jsonl").write_text(lines)
    (folder / "wiki.test.tokens").write_text(" \n = Woods = \n \n " + " , ".join(TEXTS) + " . \n")
    (folder / "words.jsonl").write_text(
        lines.replace("Whose woods these are I think", "I").replace("though he will", "")
    )
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
            scores = peer(ids[None, :-1]).logits[0, -counted:, : ByteTokenizer.vocabulary].double()  # no padding
        labels = ids[-counted:]
        correct = scores.argmax(-1) == labels
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
        total += Score(loss.item(), counted, int(correct.sum()), 1, int(correct.all()))
    return total


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, model=2), MeshConfig(pipe=2)], ids=str)
def test_the_figures_of_every_task_are_those_of_transformers(tmp_path, mesh):
    model = replace(_model("four heads"), vocabulary=257, vocabulary_multiple=32, sequence=32)
    peer = _peer(model)
    with torch.no_grad():  # louder, so that some guesses are right
        peer.transformer.wte.weight.mul_(4)
        peer.transformer.wte.weight[ord("e")].mul_(3)
    config = inference_config(_config(model), mesh)
    scorer = Scorer(config, make_mesh(mesh))
    weights = _from_peer(_numpy(peer.named_parameters()), scorer.abstract_model)
    weights = jax.tree.map(lambda w, leaf: jax.device_put(w, leaf.sharding), weights, scorer.abstract_model)
    correct = 0
    for task in _tasks(tmp_path, model.sequence):
        ours = [scorer.score(weights, windows) for windows in task.passes]
        theirs = [_by_torch(peer.eval(), windows) for windows in task.passes]
        for found, expected in zip(task.metrics(ours), task.metrics(theirs), strict=True):
            same = pytest.approx(expected.value, rel=2e-4) if isinstance(found.value, float) else expected.value
            assert found.value == same, found.name
        for found, expected in zip(ours, theirs, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-5)
            assert found.correct == expected.correct
            correct += found.correct
    assert correct, "no guess was right, so the argmax was not tested"
