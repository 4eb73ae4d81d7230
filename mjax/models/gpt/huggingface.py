"""GPT2LMHeadModel and BloomForCausalLM of `transformers`: a GPT here.

GPT-2 is the model that mjax trains (pre-LN, learned positions, tied embedding), with other names. Its `Conv1D` stores a
weight as [in, out], as does mjax, so no tensor is transposed: layouts differ by a reshape.

BLOOM, from 560M to 176B (arXiv 2211.05100), has Megatron-DeepSpeed's layout: queries, keys and values are one
`torch.nn.Linear` [out, in], head by head. There are no learned positions, so nothing in the files limits the sequence
length; `seq_length`, which published files contain and `transformers` does not read, is the length in training. A
`hidden_dropout`, 0 in all of them, would apply to the embedding too in mjax, which it does not there.
"""

from mjax.models.huggingface.family import Family

GPT2 = Family(
    model="GPT2LMHeadModel",
    names={
        "embedding": "transformer.wte", "positions": "transformer.wpe",
        "blocks.attention_norm": "transformer.h.{0}.ln_1",
        "blocks.attention.qkv": "transformer.h.{0}.attn.c_attn",
        "blocks.attention.out": "transformer.h.{0}.attn.c_proj", "blocks.mlp_norm": "transformer.h.{0}.ln_2",
        "blocks.mlp.up": "transformer.h.{0}.mlp.c_fc", "blocks.mlp.down": "transformer.h.{0}.mlp.c_proj",
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
        "n_layer": ("layers", ...), "n_embd": ("hidden", ...), "n_head": ("heads", ...),
        "n_positions": ("sequence", ...), "vocab_size": ("vocabulary", ...), "n_inner": ("feed_forward", None),
        "attn_pdrop": ("attention_dropout", 0.1), "resid_pdrop": ("hidden_dropout", 0.1),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5), "initializer_range": ("init_std", 0.02),
        "activation_function": ("activation", "gelu_new"),
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    same={"n_ctx": ("n_positions", None), "embd_pdrop": ("resid_pdrop", 0.1)},
    without_effect=frozenset({
        "reorder_and_upcast_attn",  # affects rounding only: mjax always computes the softmax in float32
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    }),
)  # fmt: skip

BLOOM = Family(
    model="BloomForCausalLM",
    names={
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "blocks.attention_norm": "transformer.h.{0}.input_layernorm",
        "blocks.attention.qkv": "transformer.h.{0}.self_attention.query_key_value",
        "blocks.attention.out": "transformer.h.{0}.self_attention.dense",
        "blocks.mlp_norm": "transformer.h.{0}.post_attention_layernorm",
        "blocks.mlp.up": "transformer.h.{0}.mlp.dense_h_to_4h",
        "blocks.mlp.down": "transformer.h.{0}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
    },
    qkv="ncd",
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    model_type="bloom",
    generates=True,
    fixed={"kind": "gpt", "positions": "alibi", "embedding_layernorm": True, "activation": "gelu_tanh"},
    fields={
        "n_layer": ("layers", ...), "hidden_size": ("hidden", ...), "n_head": ("heads", ...),
        "seq_length": ("sequence", 2048), "vocab_size": ("vocabulary", ...),
        "attention_dropout": ("attention_dropout", 0.0), "hidden_dropout": ("hidden_dropout", 0.0),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5), "initializer_range": ("init_std", 0.02),
    },
    only={"apply_residual_connection_post_layernorm": False},
    other_names={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    without_effect=frozenset({
        "slow_but_exact",  # how transformers can repeat the rounding of tensor-parallel training
        # From Megatron-DeepSpeed, in published files: kernels, and settings that `transformers` does not read.
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi",
        "skip_bias_add", "skip_bias_add_qkv",
    }),
)  # fmt: skip
FAMILIES = (GPT2, BLOOM)
