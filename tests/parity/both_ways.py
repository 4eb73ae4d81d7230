"""A run made of a checkpoint says what the model of `transformers` says."""

import numpy as np
import torch

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
