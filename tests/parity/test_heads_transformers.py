"""The heads of tasks against `transformers` with the same random weights: BertFor… is post-LN, MegatronBertFor… pre-LN.
Scores, losses, gradients and exports of sequence classification, multiple choice and question answering."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax import cli
from mjax.inference import inference_config
from mjax.interop.convert import write_run
from mjax.model_config import as_kind
from mjax.names import leaf_name
from mjax.parallel.mesh import make_mesh
from mjax.tasks.labelled import Examples
from mjax.tasks.scoring import TaskScorer
from tests.finetuning.test_heads import HEADS
from tests.interop.whole_weights import reader_of
from tests.parity.test_bert_transformers import _config, _from_peer, _numpy
from tests.small import examples_of, gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from tests.parity.outputs import random_bert  # noqa: E402

pytestmark = pytest.mark.parity

PEERS = {
    "classification": ("ForSequenceClassification", "classifier"),
    "multiple_choice": ("ForMultipleChoice", "classifier"),
    "span": ("ForQuestionAnswering", "qa_outputs"),
}
CASES = [(head, layernorm) for head in HEADS for layernorm in ("pre", "post")]


def _task_config(head, layernorm):
    config = _config("odd heads", layernorm)
    return replace(config, model=replace(as_kind(config.model, "bert_task"), **HEADS[head]))


def _peer(model):
    return random_bert(model, PEERS[model.head][0], num_labels=model.outputs)


def _weights(tensors, ours, model):
    """Tensors of the peer, by its names, in the tree of `ours`."""
    return _from_peer(tensors, ours, model.layernorm, {"head": PEERS[model.head][1]})


def _run_peer(peer, model, batch):
    rows = {name: torch.tensor(array.astype(np.int64)) for name, array in batch.items()}
    if model.head != "multiple_choice":
        rows = {name: tensor[:, 0] if tensor.ndim == 3 else tensor for name, tensor in rows.items()}
    labels = (
        {"start_positions": rows["start"], "end_positions": rows["end"]}
        if model.head == "span"
        else {"labels": rows["label"]}
    )
    return peer(
        input_ids=rows["tokens"],
        attention_mask=1 - rows["documents"],
        token_type_ids=rows["token_types"],
        **labels,
    )


@pytest.mark.parametrize(("head", "layernorm"), CASES)
def test_scores_equal_those_of_transformers(head, layernorm):
    config = _task_config(head, layernorm)
    peer, batch = _peer(config.model), examples_of(config, 0)
    inference = inference_config(config, config.mesh, micro_batch=3)
    scorer = TaskScorer(inference, make_mesh(config.mesh))
    weights = _weights(_numpy(peer.named_parameters()), scorer.abstract_model, config.model)
    examples = Examples(batch["tokens"], batch["token_types"], batch["documents"] == 0, {})
    found, expected = scorer(weights, examples), _run_peer(peer, config.model, batch)
    if head == "span":
        ends = torch.stack([expected.start_logits, expected.end_logits], dim=1).detach().numpy()
        is_text = np.broadcast_to(examples.text, ends.shape)
        np.testing.assert_allclose(found[is_text], ends[is_text], atol=2e-5, rtol=0)
    else:
        np.testing.assert_allclose(found, expected.logits.detach().numpy(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("head", "layernorm"), CASES)
def test_loss_and_gradients_equal_those_of_transformers(head, layernorm):
    config = _task_config(head, layernorm)
    peer, batch = _peer(config.model), examples_of(config, 1)
    if head == "span":  # its peer takes padding for a place where an answer may be
        batch["documents"] = np.zeros_like(batch["documents"])
    batch["tokens"] = np.maximum(batch["tokens"], 1)  # torch gives the row of id 0, padding, no gradient
    program, build = gradient_program(config)
    weights = _weights(_numpy(peer.named_parameters()), build(), config.model)
    figures, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected_loss = _run_peer(peer, config.model, batch).loss
    expected_loss.backward()
    assert float(figures[0]) == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = _weights(_numpy((name, p.grad) for name, p in peer.named_parameters()), weights, config.model)
    largest = max(float(jnp.abs(gradient).max()) for gradient in jax.tree.leaves(expected))
    for (path, ours), theirs in zip(
        jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4 * largest, err_msg=leaf_name(path))


@pytest.mark.parametrize(("head", "layernorm"), CASES)
def test_an_export_opens_in_transformers_with_the_same_weights(head, layernorm, tmp_path):
    config = _task_config(head, layernorm)
    peer, scorer = _peer(config.model), TaskScorer(inference_config(config, config.mesh), make_mesh(config.mesh))
    weights = _weights(_numpy(peer.named_parameters()), scorer.abstract_model, config.model)
    write_run(tmp_path / "run", config, None, reader_of(weights))
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    opened, about = type(peer).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(about[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert opened.config.num_labels == peer.config.num_labels or head == "multiple_choice"
    expected = peer.state_dict()
    assert opened.state_dict().keys() == expected.keys()
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
