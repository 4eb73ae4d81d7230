"""BERT and the heads of tasks against `transformers` with the same random weights, in float64: scores, losses and
gradients on meshes, and exports. Bert… is post-LN, MegatronBert… pre-LN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import BERTConfig, Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from mjax.config.model import convert_kind
from mjax.generation.inference import inference_config
from mjax.interop.convert import export_family, write_run
from mjax.models.build import build_model
from mjax.parallel.mesh import make_mesh
from mjax.tasks.labelled_task import Examples
from mjax.tasks.scoring import TaskScorer
from tests.finetuning.test_heads import HEADS
from tests.interop.whole_weights import reader_of
from tests.small import examples_of, gradient_program, pairs_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.outputs import (  # noqa: E402
    assert_gradients,
    assert_scores,
    exported,
    gradients_of,
    in_float64,
    outputs_of_pretraining,
    random_bert,
    weights_of,
)
from tests.parity.peers import imported  # noqa: E402

pytestmark = pytest.mark.parity

PEERS = {"classification": "SequenceClassification", "multiple_choice": "MultipleChoice", "span": "QuestionAnswering"}
CASES = [(head, layernorm) for head in HEADS for layernorm in ("pre", "post")]
SP = {"sequence_parallel": True}


def _config(layernorm, activation="gelu_erf", head=None, **mesh):
    model = BERTConfig(
        layers=2, hidden=32, heads=4, sequence=24, vocabulary=96, layernorm=layernorm, activation=activation,
        attention="xla", vocabulary_multiple=1, hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=1e-3,
    )  # fmt: skip
    return Config(
        model=model if head is None else replace(convert_kind(model, "bert_task"), **HEADS[head]),
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(global_batch=6, micro_batch=3),
    )


def _peer(model):
    return random_bert(model, f"For{PEERS[model.head]}", num_labels=model.outputs).double()


def _outputs(peer, model, batch):
    if model.kind == "bert":
        return outputs_of_pretraining(peer, batch)
    rows = {name: torch.tensor(array.astype(np.int64)) for name, array in batch.items()}
    if model.head != "multiple_choice":
        rows = {name: tensor[:, 0] if tensor.ndim == 3 else tensor for name, tensor in rows.items()}
    labels = {"start_positions": rows["start"], "end_positions": rows["end"]} if model.head == "span" else {}
    labels = labels or {"labels": rows["label"]}
    given = {
        "input_ids": rows["tokens"],
        "attention_mask": 1 - rows["documents"],
        "token_type_ids": rows["token_types"],
    }
    return peer(**given, **labels)


def _assert_gradients(config, batch, peer, weights):
    means, gradients = gradient_program(config)[0](weights, batch, jnp.int32(0), jnp.float64(1))
    expected = _outputs(peer, config.model, batch).loss
    peer.zero_grad()
    expected.backward()
    loss = means[0] + means[1] if config.model.kind == "bert" else means[0]
    assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
    assert_gradients(gradients, gradients_of(peer, gradients, export_family(config.model), config.model))


@pytest.mark.parametrize(
    ("layernorm", "activation", "mesh"),
    [("pre", "gelu_tanh", {"model": 4} | SP), ("post", "gelu_erf", {"pipe": 2, "model": 2})],
)
def test_pretraining_equals_transformers(layernorm, activation, mesh, tmp_path):
    """Through `mjax convert`: scores, loss and gradients on a mesh, and the export."""
    config = _config(layernorm, activation, **mesh)
    peer = random_bert(config.model, "ForPreTraining")
    found, weights = imported(peer, tmp_path)
    config = replace(config, model=found.model)
    batch = pairs_of(config, 0)
    assert_scores(tmp_path / "run", peer, batch)
    again = exported(peer, tmp_path)
    with jax.enable_x64(True):
        _assert_gradients(config, batch, peer.double(), in_float64(weights))
    logits = [outputs_of_pretraining(each, batch).prediction_logits for each in (again, peer)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(("head", "layernorm"), CASES)
def test_head_equals_transformers(head, layernorm):
    """Scores on two replicas, loss and gradients under tensor and sequence parallelism."""
    config = _config(layernorm, head=head, model=2, sequence_parallel=True)
    batch, family = examples_of(config, 0), export_family(config.model)
    with jax.enable_x64(True):
        peer = _peer(config.model)
        inference = inference_config(config, MeshConfig(data=2), micro_batch=2)
        scorer = TaskScorer(inference, make_mesh(inference.mesh))
        examples = Examples(batch["tokens"], batch["token_types"], batch["documents"] == 0, {})
        found = scorer(weights_of(peer, scorer.abstract_model, family, config.model), examples)
        expected = _outputs(peer, config.model, batch)
        if head == "span":  # padding holds no answer
            ends = torch.stack([expected.start_logits, expected.end_logits], dim=1).detach().numpy()
            is_text = np.broadcast_to(examples.text, ends.shape)
            np.testing.assert_allclose(found[is_text], ends[is_text], atol=1e-6, rtol=1e-6)
            batch["documents"] = np.zeros_like(batch["documents"])  # and its peer reads one document
        else:
            np.testing.assert_allclose(found, expected.logits.detach().numpy(), atol=1e-6, rtol=1e-6)
        weights = weights_of(peer, gradient_program(config)[1](), family, config.model)
        _assert_gradients(config, batch, peer, weights)


@pytest.mark.parametrize(("head", "layernorm"), CASES[::2] + CASES[1:2])
def test_exported_head_opens_with_same_weights(head, layernorm, tmp_path):
    config = _config(layernorm, head=head)
    peer, family = _peer(config.model).float(), export_family(config.model)
    weights = weights_of(peer, jax.eval_shape(lambda: build_model(0, config.model)), family, config.model)
    write_run(tmp_path / "run", replace(config, precision=PrecisionConfig()), None, reader_of(weights))
    peer.save_pretrained(tmp_path / "hf")
    again = exported(peer, tmp_path)
    assert again.config.num_labels == peer.config.num_labels or head == "multiple_choice"
