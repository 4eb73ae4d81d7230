"""Llama, Mistral, Qwen and OLMo 2 through `mjax convert`: in with the numbers of `transformers`, out byte for byte."""

from dataclasses import replace

import numpy as np
import pytest

from mjax.interop.convert import family_of
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.both_ways import assert_gradients, exported  # noqa: E402
from tests.parity.outputs import batch_of, logits_of, loss_of, with_noise  # noqa: E402
from tests.parity.peers import imported  # noqa: E402

pytestmark = pytest.mark.parity

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "attn_implementation": "eager", "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
QWEN = EXPERTS | {"moe_intermediate_size": 20, "norm_topk_prob": True, "head_dim": 10}
MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama 3.1": ("Llama", {"rope_parameters": SCALED}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 8}),
    "qwen 2.5": ("Qwen2", {}),
    "qwen 2.5, windows": ("Qwen2", WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen 3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
    "olmo 2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "experts_implementation": "eager"}),
    "qwen 3 moe": ("Qwen3Moe", QWEN),
    "qwen 3 moe, first layer dense": ("Qwen3Moe", QWEN | {"mlp_only_layers": [0]}),
    "qwen 3 moe, dense between": ("Qwen3Moe", QWEN | {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", EXPERTS),
}


def peer_of(name):
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **settings})
    return with_noise(getattr(transformers, f"{kind}ForCausalLM")(config).eval())


@pytest.mark.parametrize("name", MODELS)
def test_model_comes_in_and_goes_out_the_same(name, tmp_path):
    peer = peer_of(name)
    config, weights = imported(peer, tmp_path)
    batch = batch_of(config.model)
    mixture = config.model.kind == "mixture"
    names = ("loss", "router_entropy", "expert_load") if mixture else None
    program, _ = gradient_program(replace(config, model=replace(config.model, attention="xla")), names)
    loss, gradients = program(weights, batch, np.int32(0), np.float32(1))
    loss = loss[0] if mixture else loss
    expected_loss = loss_of(peer, batch)
    expected_loss.backward()
    assert float(loss) == pytest.approx(expected_loss.item(), rel=2e-6)
    family = family_of(config.model)
    family = replace(family, names={**family.names, **family.fused})  # as transformers holds them
    assert_gradients(family, gradients, peer, config.model)
    again = exported(peer, tmp_path)
    with torch.no_grad():
        assert torch.equal(logits_of(again, batch), logits_of(peer, batch))
