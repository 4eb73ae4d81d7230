"""GPT2LMHeadModel of `transformers`, the format of GPT-2 and its many relatives.

It is the model that mjax trains (pre-LN, learned positions, tied embedding), with other names. GPT-2's `Conv1D` stores
a weight as [in, out], as does mjax, so no tensor is transposed: layouts differ by a reshape.
"""

from mjax.interop.family import Family

GPT2 = Family(
    model="GPT2LMHeadModel",
    names={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks.attention_norm": "transformer.h.{0}.ln_1",
        "blocks.attention.qkv": "transformer.h.{0}.attn.c_attn",
        "blocks.attention.out": "transformer.h.{0}.attn.c_proj",
        "blocks.mlp_norm": "transformer.h.{0}.ln_2",
        "blocks.mlp.up": "transformer.h.{0}.mlp.c_fc",
        "blocks.mlp.down": "transformer.h.{0}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
    },
    transposed=False,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, stored by old versions
    model_type="gpt2",
    generates=True,
    fixed={"kind": "gpt", "positions": "learned", "embedding_layernorm": False},
    fields={
        "n_layer": ("layers", 12),
        "n_embd": ("hidden", 768),
        "n_head": ("heads", 12),
        "n_positions": ("sequence", 1024),
        "vocab_size": ("vocabulary", 50257),
        "n_inner": ("feed_forward", None),
        "attn_pdrop": ("attention_dropout", 0.1),
        "resid_pdrop": ("hidden_dropout", 0.1),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "activation_function": ("activation", "gelu_new"),
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    same={"n_ctx": ("n_positions", None), "embd_pdrop": ("resid_pdrop", 0.1)},
    without_effect=frozenset({
        "reorder_and_upcast_attn",  # affects rounding only: mjax always computes the softmax in float32
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    }),
)  # fmt: skip
