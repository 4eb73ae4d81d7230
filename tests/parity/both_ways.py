"""What `mjax convert` owes a model of `transformers`: its gradients in, every byte out."""

import numpy as np
import torch

from mjax import cli
from tests.interop.folders import read_folder
from tests.interop.whole_weights import assert_same, weight_arrays


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
