"""GPT2LMHeadModel of `transformers`, the form in which GPT-2 and its many relatives are published.

It is the model mjax trains (pre-LN, learned positions, tied embedding), under other names. GPT-2's `Conv1D` stores a
weight as [in, out], and so does mjax, therefore no tensor is transposed: layouts differ by a reshape.
"""

from mjax.interop.family import Family
from mjax.interop.places import linear, norm
from mjax.interop.settings import Settings
from mjax.interop.weights import Naming

SETTINGS = Settings(
    fixed={"kind": "gpt", "positions": "learned", "embedding_layernorm": False},
    counts={
        "n_layer": ("layers", 12),
        "n_embd": ("hidden", 768),
        "n_head": ("heads", 12),
        "n_positions": ("sequence", 1024),
        "vocab_size": ("vocabulary", 50257),
        "n_inner": ("feed_forward", None),
    },
    numbers={
        "attn_pdrop": ("attention_dropout", 0.1),
        "resid_pdrop": ("hidden_dropout", 0.1),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
        "initializer_range": ("init_std", 0.02),
    },
    activation=("activation_function", "gelu_new"),
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    same={"n_ctx": ("n_positions", None), "embd_pdrop": ("resid_pdrop", 0.1)},
    without_effect=frozenset({
        "reorder_and_upcast_attn",  # about rounding only: mjax always takes the softmax in float32
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    }),
)  # fmt: skip

LAYER = "transformer.h.{}."
PLACES = {
    "embedding.table": ("v h", "transformer.wte.weight"),
    "positions": ("s h", "transformer.wpe.weight"),
    **norm("blocks.attention_norm", LAYER + "ln_1"),
    **linear("blocks.attention.qkv", "h (c n d)", LAYER + "attn.c_attn"),
    **linear("blocks.attention.out", "(n d) h", LAYER + "attn.c_proj"),
    **norm("blocks.mlp_norm", LAYER + "ln_2"),
    **linear("blocks.mlp.up", "h f", LAYER + "mlp.c_fc"),
    **linear("blocks.mlp.down", "f h", LAYER + "mlp.c_proj"),
    **norm("final_norm", "transformer.ln_f"),
}

GPT2 = Family(
    model_type="gpt2",
    settings=SETTINGS,
    naming=Naming(
        model="GPT2LMHeadModel",
        places=PLACES,
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, which old versions stored
    ),
    generates=True,
)
