"""What `mjax convert` owes a model of `transformers`: its scores and gradients in, every byte out."""

import numpy as np
import torch

from mjax import cli
from tests.interop.folders import read_folder
from tests.interop.whole_weights import assert_same, weight_arrays
from tests.parity.megatron_written import scores_of
from tests.parity.outputs import logits_of, outputs_of_pretraining


def assert_scores(run, peer, batch):
    """A run says what its peer says; of text only, for nobody reads what comes of padding."""
    with torch.no_grad():
        if "token_types" in batch:
            expected = outputs_of_pretraining(peer, batch)
            _, (found, order) = scores_of(run, *(batch[name] for name in ("tokens", "token_types", "documents")))
            np.testing.assert_allclose(order, expected.seq_relationship_logits.numpy(), atol=2e-5, rtol=1e-5)
            expected, text = expected.prediction_logits.numpy(), batch["documents"] == 0
        else:
            _, found = scores_of(run, batch["tokens"])
            expected, text = logits_of(peer, batch).numpy(), slice(None)
    vocabulary = peer.config.vocab_size
    np.testing.assert_allclose(found[text][..., :vocabulary], expected[text], atol=2e-5, rtol=1e-5)


def assert_gradients(family, gradients, peer, model):
    """Ours are those of the peer, after its backward pass."""
    expected = {name: weight.grad.numpy() for name, weight in peer.named_parameters()}
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    found = weight_arrays(family, gradients, model)
    assert found.keys() >= expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4 * largest, err_msg=name)


def exported(peer, folder, *flags):
    """The peer as its class opens the export of the run in `folder`; no key missing, every tensor the same."""
    assert cli.main(["convert", "to-hf", str(folder / "run"), str(folder / "out"), *flags]) == 0
    again, report = type(peer).from_pretrained(folder / "out", output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), report
    assert_same(read_folder(folder / "out"), read_folder(folder / "hf"))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), peer.parameters(), strict=True))
    return again.eval()
