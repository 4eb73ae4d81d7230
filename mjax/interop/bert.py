"""BertForPreTraining of `transformers`, the original post-LN BERT, and MegatronBertForPreTraining, the pre-LN one of
Megatron-LM (arXiv 1909.08053, figures 7a and 7b). `torch.nn.Linear` keeps [out, in], so every matrix is transposed.

    predicts                  in transformers                     here
    masked tokens             cls.predictions                     mlm
    how two stretches follow  cls.seq_relationship, on pooler     order, on pooler: class 0 is "in order" in both

What class 1 of the second means is what the model was trained with: a stretch from elsewhere (next sentence prediction,
as in Google's models), or the two stretches swapped (sentence order, as in Megatron's and ours). No file says which.

The two differ in where the LayerNorms are. Megatron's has one before attention (`attention.ln`), one before the MLP
(`ln`) and a last one (`encoder.ln`), and none behind the embedding.

What `mjax finetune` leaves has the head of a task in place of both: `…ForSequenceClassification`, `…ForMultipleChoice`
and `…ForQuestionAnswering`, which has no pooler either.
"""

from dataclasses import replace

from mjax.interop.family import Family
from mjax.interop.places import linear, norm
from mjax.interop.settings import Settings
from mjax.interop.weights import Naming

SETTINGS = Settings(
    fixed={"kind": "bert", "layernorm": "post", "head": "pretraining"},
    counts={
        "num_hidden_layers": ("layers", 12),
        "hidden_size": ("hidden", 768),
        "num_attention_heads": ("heads", 12),
        "intermediate_size": ("feed_forward", 3072),
        "max_position_embeddings": ("sequence", 512),
        "vocab_size": ("vocabulary", 30522),
    },
    numbers={
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
        "hidden_dropout_prob": ("hidden_dropout", 0.1),
        "layer_norm_eps": ("layernorm_epsilon", 1e-12),
        "initializer_range": ("init_std", 0.02),
    },
    activation=("hidden_act", "gelu"),
    only={"type_vocab_size": 2, "position_embedding_type": "absolute", "is_decoder": False},
    without_effect=frozenset({
        "classifier_dropout",  # of the heads of other tasks
        # of Google's own code, in the files of its models
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    }),
)  # fmt: skip

LAYER = "bert.encoder.layer.{}."
OF_BOTH = {
    "embedding.table": ("v h", "bert.embeddings.word_embeddings.weight"),
    "positions": ("s h", "bert.embeddings.position_embeddings.weight"),
    "token_types": ("t h", "bert.embeddings.token_type_embeddings.weight"),
    **linear(
        "blocks.attention.qkv",
        "(n d) h",
        *(f"{LAYER}attention.self.{part}" for part in ("query", "key", "value")),
    ),
    **linear("blocks.attention.out", "h (n d)", LAYER + "attention.output.dense"),
    **linear("blocks.mlp.up", "f h", LAYER + "intermediate.dense"),
    **linear("blocks.mlp.down", "h f", LAYER + "output.dense"),
    **linear("pooler", "k h", "bert.pooler.dense"),
    **linear("mlm.transform", "k h", "cls.predictions.transform.dense"),
    **norm("mlm.norm", "cls.predictions.transform.LayerNorm"),
    "mlm.bias": ("v", "cls.predictions.bias"),
    **linear("order", "o h", "cls.seq_relationship"),
}
POST_LN = {
    **norm("embedding_norm", "bert.embeddings.LayerNorm"),
    **norm("blocks.attention_norm", LAYER + "attention.output.LayerNorm"),
    **norm("blocks.mlp_norm", LAYER + "output.LayerNorm"),
}
PRE_LN = {
    **norm("blocks.attention_norm", LAYER + "attention.ln"),
    **norm("blocks.mlp_norm", LAYER + "ln"),
    **norm("final_norm", "bert.encoder.ln"),
}

BERT = Family(
    model_type="bert",
    settings=SETTINGS,
    naming=Naming(
        model="BertForPreTraining",
        places=OF_BOTH | POST_LN,
        heads={"mlm.": "the head for masked tokens", "pooler.": "the pooler", "order.": "the order head"},
        prefix="bert.",
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=r"(bert\.)?embeddings\.(position_ids|token_type_ids)",  # counted, and zeros: old versions stored them
        renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),  # of TensorFlow
    ),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    settings=replace(
        SETTINGS,
        fixed=SETTINGS.fixed | {"layernorm": "pre"},
        counts=SETTINGS.counts
        | {
            "num_hidden_layers": ("layers", 24),
            "hidden_size": ("hidden", 1024),
            "num_attention_heads": ("heads", 16),
            "intermediate_size": ("feed_forward", 4096),
            "vocab_size": ("vocabulary", 29056),
        },
    ),
    naming=replace(BERT.naming, model="MegatronBertForPreTraining", places=OF_BOTH | PRE_LN),
)


def _of_task(family: Family, head: str, model: str, tensor: str) -> Family:
    """The family of models with the head of a task."""
    left_out = ("mlm.", "order.") + (("pooler.",) if head == "span" else ())
    encoder = {name: place for name, place in family.naming.places.items() if not name.startswith(left_out)}
    settings = replace(family.settings, fixed=family.settings.fixed | {"head": head})
    places = encoder | linear("head", "o h", tensor)
    return replace(family, settings=settings, naming=replace(family.naming, model=model, places=places))


OF_TASKS = tuple(
    _of_task(family, head, family.naming.model.replace("PreTraining", task), tensor)
    for family in (BERT, MEGATRON_BERT)
    for head, task, tensor in (
        ("classification", "SequenceClassification", "classifier"),
        ("multiple_choice", "MultipleChoice", "classifier"),
        ("span", "QuestionAnswering", "qa_outputs"),
    )
)
"""Written only."""
