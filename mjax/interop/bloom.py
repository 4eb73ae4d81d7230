"""BloomForCausalLM of `transformers`: BLOOM from 560M to 176B (arXiv 2211.05100).

Megatron-DeepSpeed's layout: queries, keys and values are one `torch.nn.Linear` [out, in], head by head. There are no
learned positions, so nothing in the files limits the length of a sequence; `seq_length`, which published files have
and `transformers` does not read, is what the model was trained with. A `hidden_dropout`, 0 in all of them, would act on
the embedding too, which it does not there.
"""

from mjax.interop.family import Family
from mjax.interop.places import linear, norm
from mjax.interop.settings import Settings
from mjax.interop.weights import Naming

SETTINGS = Settings(
    fixed={"kind": "gpt", "positions": "alibi", "embedding_layernorm": True, "activation": "gelu_tanh"},
    counts={
        "n_layer": ("layers", 2),
        "hidden_size": ("hidden", 64),
        "n_head": ("heads", 8),
        "seq_length": ("sequence", 2048),
        "vocab_size": ("vocabulary", 250880),
    },
    numbers={
        "attention_dropout": ("attention_dropout", 0.0),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
        "initializer_range": ("init_std", 0.02),
    },
    only={"apply_residual_connection_post_layernorm": False},
    other_names={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    without_effect=frozenset({
        # How tensor-parallel training rounded, and how `transformers` can repeat it.
        "pretraining_tp", "slow_but_exact",
        # Of Megatron-DeepSpeed, in published files: kernels, and settings that `transformers` does not read.
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi",
        "skip_bias_add", "skip_bias_add_qkv", "unk_token_id",
    }),
)  # fmt: skip

LAYER = "transformer.h.{}."
PLACES = {
    "embedding.table": ("v h", "transformer.word_embeddings.weight"),
    **norm("embedding_norm", "transformer.word_embeddings_layernorm"),
    **norm("blocks.attention_norm", LAYER + "input_layernorm"),
    **linear("blocks.attention.qkv", "(n c d) h", LAYER + "self_attention.query_key_value"),
    **linear("blocks.attention.out", "h (n d)", LAYER + "self_attention.dense"),
    **norm("blocks.mlp_norm", LAYER + "post_attention_layernorm"),
    **linear("blocks.mlp.up", "f h", LAYER + "mlp.dense_h_to_4h"),
    **linear("blocks.mlp.down", "h f", LAYER + "mlp.dense_4h_to_h"),
    **norm("final_norm", "transformer.ln_f"),
}

BLOOM = Family(
    model_type="bloom",
    settings=SETTINGS,
    naming=Naming(
        model="BloomForCausalLM",
        places=PLACES,
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    ),
    generates=True,
)
