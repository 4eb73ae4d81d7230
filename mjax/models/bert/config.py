"""The configs of BERT: with the heads of pretraining, and with the head of a task. No JAX is imported here."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mjax.config.bounds import Count
from mjax.config.marks import ANY_FAMILY, TUNING, By, Metric, Synonyms
from mjax.config.model import Arrays, Gelu, register
from mjax.errors import UsageError
from mjax.models.gpt.config import TransformerConfig


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """Fields shared by BERT models, whatever their head."""

    layernorm: Literal["pre", "post"] = "pre"
    """LayerNorm before attention and MLP, as rearranged in arXiv 1909.08053 (figure 7b), or after each residual sum, as
    in the original BERT (7a)."""

    causal: ClassVar[bool] = False

    def check(self, config) -> None:
        for field in ("sequence", "vocabulary"):
            if getattr(self, field) < 3:
                raise UsageError(f"--model.{field} {getattr(self, field)} is too small for a BERT; use 3 or more")


@register
@dataclass(frozen=True)
class BERTConfig(EncoderConfig):
    """An encoder that predicts masked tokens from both sides, and whether two segments of text are in order."""

    kind: Literal["bert"] = "bert"
    """Architecture of the model."""
    mlm_activation: Annotated[Gelu | None, TUNING, By("activation"), ANY_FAMILY] = None
    """GELU in the MLM head (by default the MLP's). Megatron's fused kernel covers the MLP only, so its head uses the
    exact form."""

    title: ClassVar[str] = "a BERT"
    module: ClassVar[str] = "mjax.models.bert.model:BERT"
    families: ClassVar[str] = "mjax.models.bert.huggingface:FAMILIES"
    samples: ClassVar[Literal["pairs"]] = "pairs"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "mlm_loss",
            "mlm loss {value:.4f}  ppl {perplexity:.4g}",
            verdict="validation perplexity {perplexity:.2f} of masked tokens ({value:.3f} nats); "
            "by their frequency alone {guess_perplexity:.2f} ({guess:.3f} nats)",
            axis="loss (nats per masked token)",
            title="masked tokens",
            guess="unigram_entropy",
            guess_label="by frequency alone, {guess:.3f}",
        ),
        Metric("order_loss", "sop loss {value:.4f}"),
        Metric(
            "order_accuracy",
            "sop accuracy {value:.0%}",
            verdict="sop accuracy {value:.1%} ± {error:.1%} on {sequences:,} pairs; by chance {guess:.0%}",
            axis="sentence-order accuracy",
            title="sentence order",
            guess=0.5,
            guess_label="by chance, {guess:.0%}",
            share=True,
        ),
    )

    def batch(self, data) -> Arrays:
        """The arrays of a batch.

        tokens          the pair of segments, with masks and padding
        labels          the original tokens
        loss_mask       whether a label counts: where a token was masked
        token_types     0 in the first segment, 1 in the second
        documents       0 for text, 1 for padding: neither attends to the other
        sentence_order  [], 0 if the segments are in order, 1 if they are swapped
        """
        names = {"tokens": "int32", "labels": "int32", "loss_mask": "bool", "token_types": "int32"}
        rows = {name: ((self.sequence,), dtype) for name, dtype in {**names, "documents": "int32"}.items()}
        return {**rows, "sentence_order": ((), "int32")}

    def limits(self) -> dict[str, int]:
        return {**super().limits(), "token_types": 2, "documents": 2, "sentence_order": 2}


@register
@dataclass(frozen=True)
class BERTTaskConfig(EncoderConfig):
    """A BERT with the head of a task, as `mjax finetune` trains it."""

    kind: Literal["bert_task"] = "bert_task"
    """Architecture of the model."""
    head: Literal["classification", "multiple_choice", "span"] = "classification"
    """Head output: sequence classes, choices for a question, or each token's score as first and last token of the
    answer."""
    num_labels: Annotated[Count, ANY_FAMILY, Synonyms("classes")] = 2
    """Classes (head classification) or choices (head multiple_choice)."""

    title: ClassVar[str] = "a BERT with the head of a task"
    module: ClassVar[str] = "mjax.models.bert.model:TaskBERT"
    families: ClassVar[str] = "mjax.models.bert.huggingface:OF_TASKS"
    samples: ClassVar[None] = None

    def check(self, config) -> None:
        super().check(config)
        if (chunks := config.train.loss_chunks) > 1:
            raise UsageError(f"--train.loss-chunks {chunks} does nothing for {self.title}; remove it")

    @property
    def sequences(self) -> int:
        return self.num_labels if self.head == "multiple_choice" else 1

    @property
    def outputs(self) -> int:
        """Numbers that the head outputs, per sequence, or per token with head span."""
        return {"classification": self.num_labels, "multiple_choice": 1, "span": 2}[self.head]

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels of a sample: a class, a choice, or the positions of the first and last token."""
        return ("start", "end") if self.head == "span" else ("label",)

    def batch(self, data) -> Arrays:
        """Tokens, token types and documents [c, s], one row per choice, and the labels [] of `label_names`."""
        rows = dict.fromkeys(("tokens", "token_types", "documents"), ((self.sequences, self.sequence), "int32"))
        return rows | dict.fromkeys(self.label_names, ((), "int32"))

    def limits(self) -> dict[str, int]:
        labels = {"label": self.num_labels, "start": self.sequence, "end": self.sequence}
        return {**super().limits(), "token_types": 2, "documents": 2, **labels}
