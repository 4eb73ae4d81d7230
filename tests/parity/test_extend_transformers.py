"""`mjax convert from-hf --rope`: the logits that `transformers` has with the same scaling, past the original length."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")

from tests.parity.outputs import batch_of, exported, in_float64  # noqa: E402
from tests.parity.outputs import logits_of as logits_of_peer  # noqa: E402
from tests.parity.peers import imported  # noqa: E402
from tests.parity.test_llama_transformers import (  # noqa: E402
    LLAMA3,
    SMALL,
    logits_of,
    peer_of,
    wide_modules,  # noqa: F401
)

pytestmark = pytest.mark.parity

ORIGINAL = SMALL["max_position_embeddings"]
ROPES = {
    "yarn:8": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "llama3:8": {**LLAMA3, "original_max_position_embeddings": ORIGINAL},
    "linear:8": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize(("family", "given"), [("qwen 3", "yarn:8"), ("llama 2", "llama3:8"), ("llama 2", "linear:8")])
def test_unscaled_checkpoint_has_logits_of_scaled_model(family, given, tmp_path):
    unscaled = peer_of(family)
    config, weights = imported(unscaled, tmp_path, "--rope", given)
    assert config.model.sequence == 8 * ORIGINAL
    rope = {**ROPES[given], "rope_theta": unscaled.config.rope_parameters["rope_theta"]}
    longer = transformers.AutoConfig.from_pretrained(
        tmp_path / "hf", rope_parameters=rope, max_position_embeddings=8 * ORIGINAL, attn_implementation="eager"
    )
    scaled = type(unscaled)(longer).eval()
    scaled.load_state_dict(unscaled.state_dict())
    batch = batch_of(config.model)
    with torch.no_grad():
        expected = logits_of_peer(scaled.double(), batch)
        assert torch.equal(logits_of_peer(exported(unscaled, tmp_path), batch), expected)
    with jax.enable_x64(True):
        found = logits_of(config, in_float64(weights), batch)[..., : config.model.vocabulary]
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-9)
