"""BertForPreTraining of `transformers`, the original post-LN BERT, and MegatronBertForPreTraining, the pre-LN one of
Megatron-LM (arXiv 1909.08053, figure 7). `torch.nn.Linear` stores [out, in], so every matrix is transposed.

    predicts                  in transformers                     here
    masked tokens             cls.predictions                     mlm
    order of two segments     cls.seq_relationship, on pooler     order, on pooler: class 0 is "in order" in both

Class 1 of the order depends on the training task: a segment from elsewhere (next-sentence prediction, as in Google's
models), or the two segments swapped (sentence order, as in Megatron's and ours). No file records which.

The two differ in their LayerNorms. Megatron's has one before attention (`attention.ln`), one before the MLP
(`ln`) and a last one (`encoder.ln`), and none after the embedding.

`mjax finetune` replaces both heads by a task head: `…ForSequenceClassification`, `…ForMultipleChoice` and
`…ForQuestionAnswering`, which has no pooler either.
"""

from dataclasses import replace

from mjax.models.huggingface.family import SIZES, Family

LAYER = "bert.encoder.layer.{0}"
NAMES = {
    "embedding": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "blocks.attention.qkv": tuple(f"{LAYER}.attention.self.{part}" for part in ("query", "key", "value")),
    "blocks.attention.out": f"{LAYER}.attention.output.dense",
    "blocks.mlp.up": f"{LAYER}.intermediate.dense",
    "blocks.mlp.down": f"{LAYER}.output.dense",
    "pooler": "bert.pooler.dense",
    "mlm.transform": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm": "cls.predictions",
    "order": "cls.seq_relationship",
}
"""Common to both, without the LayerNorms."""

BERT = Family(
    model="BertForPreTraining",
    names=NAMES
    | {
        "embedding_norm": "bert.embeddings.LayerNorm",
        "blocks.attention_norm": f"{LAYER}.attention.output.LayerNorm",
        "blocks.mlp_norm": f"{LAYER}.output.LayerNorm",
    },
    heads={"mlm.": "the head for masked tokens", "pooler.": "the pooler", "order.": "the order head"},
    prefix="bert.",
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=r"(bert\.)?embeddings\.(position_ids|token_type_ids)",  # position ids and zeros, stored by old versions
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),  # from TensorFlow
    model_type="bert",
    fixed={"kind": "bert", "layernorm": "post"},
    fields={
        **SIZES,
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
        "hidden_dropout_prob": ("hidden_dropout", 0.1),
        "layer_norm_eps": ("layernorm_epsilon", 1e-12),
        "hidden_act": ("activation", "gelu"),
    },
    only={"type_vocab_size": 2, "position_embedding_type": "absolute", "is_decoder": False},
    without_effect=frozenset({
        "classifier_dropout",  # for heads of other tasks
        # from Google's code, in the files of its models
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    }),
)  # fmt: skip
MEGATRON_BERT = replace(
    BERT,
    model="MegatronBertForPreTraining",
    names=NAMES
    | {
        "blocks.attention_norm": f"{LAYER}.attention.ln",
        "blocks.mlp_norm": f"{LAYER}.ln",
        "final_norm": "bert.encoder.ln",
    },
    model_type="megatron-bert",
    fixed=BERT.fixed | {"layernorm": "pre"},
)
FAMILIES = (BERT, MEGATRON_BERT)
OF_TASKS = tuple(
    replace(
        family,
        model=family.model.replace("PreTraining", task),
        names=family.names | {"head": tensor},
        written_only=True,
        fixed=family.fixed | {"kind": "bert_task", "head": head},
    )
    for family in (BERT, MEGATRON_BERT)
    for head, task, tensor in (
        ("classification", "SequenceClassification", "classifier"),
        ("multiple_choice", "MultipleChoice", "classifier"),
        ("span", "QuestionAnswering", "qa_outputs"),
    )
)
