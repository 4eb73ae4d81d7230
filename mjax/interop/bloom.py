"""BloomForCausalLM of `transformers`: BLOOM from 560M to 176B (arXiv 2211.05100).

It has Megatron-DeepSpeed's layout: queries, keys and values are one `torch.nn.Linear` [out, in], head by head. There
are no learned positions, so nothing in the files limits the sequence length; `seq_length`, which published files
contain and `transformers` does not read, is the length in training. A `hidden_dropout`, 0 in all of them, would apply
to the embedding too in mjax, which it does not there.
"""

from mjax.interop.family import Family

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
        "n_layer": ("layers", 2),
        "hidden_size": ("hidden", 64),
        "n_head": ("heads", 8),
        "seq_length": ("sequence", 2048),
        "vocab_size": ("vocabulary", 250880),
        "attention_dropout": ("attention_dropout", 0.0),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
        "initializer_range": ("init_std", 0.02),
    },
    only={"apply_residual_connection_post_layernorm": False},
    other_names={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    without_effect=frozenset({
        # Rounding in tensor-parallel training, and how `transformers` can repeat it.
        "pretraining_tp", "slow_but_exact",
        # From Megatron-DeepSpeed, in published files: kernels, and settings that `transformers` does not read.
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi",
        "skip_bias_add", "skip_bias_add_qkv", "unk_token_id",
    }),
)  # fmt: skip
