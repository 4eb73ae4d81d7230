"""What models of `transformers` make of our batches."""

import numpy as np
import torch
import transformers


def batch_of(model, seed=0):
    """Four sequences of random tokens for a GPT, with their labels."""
    rows = np.random.default_rng(seed).integers(0, model.vocabulary, (4, model.sequence + 1))
    return {"tokens": rows[:, :-1].astype(np.int32), "labels": rows[:, 1:].astype(np.int32)}


def logits_of(peer, batch):
    """Scores of a GPT, [b, s, v]."""
    return peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits


def loss_of(peer, batch):
    """Mean over all labels, as ours."""
    labels = torch.tensor(batch["labels"], dtype=torch.long)
    return torch.nn.functional.cross_entropy(logits_of(peer, batch).flatten(0, 1), labels.flatten())


def outputs_of_pretraining(peer, batch):
    """What a …ForPreTraining of BERT gives for a batch of pairs: both scores and the loss."""
    tensors = {name: torch.tensor(array.astype(np.int64)) for name, array in batch.items()}
    return peer(
        input_ids=tensors["tokens"],
        attention_mask=1 - tensors["documents"],
        token_type_ids=tensors["token_types"],
        labels=torch.where(tensors["loss_mask"] == 1, tensors["labels"], -100),
        next_sentence_label=tensors["sentence_order"],
    )


def random_bert(model, ending, **settings):
    """The class of `transformers` that has a BERT's LayerNorms and whose name has this ending, with random weights."""
    torch.manual_seed(0)
    kind = "Bert" if model.layernorm == "post" else "MegatronBert"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocabulary,
        max_position_embeddings=model.sequence,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.mlp_width,
        hidden_act="gelu_new" if model.activation == "gelu_tanh" else "gelu",
        layer_norm_eps=model.layernorm_epsilon,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **settings,
    )
    return with_noise(getattr(transformers, f"{kind}{ending}")(config))


def with_noise(peer):
    """The peer with noise on every weight: biases are 0 and LayerNorms 1 at first, a mistake could hide behind them."""
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return peer
