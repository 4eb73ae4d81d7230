"""The config of a mixture of experts: a Llama whose MLPs are several, of which every token takes a few.

As in `model_config.py`, no JAX is imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from mjax.config.bounds import Count, CountOrZero, Positive
from mjax.config.marks import TUNING, By, Elsewhere
from mjax.config.model import Tuned, register
from mjax.config.pattern import Pattern
from mjax.errors import UsageError
from mjax.models.llama.config import LlamaConfig

EXPERTS = "experts"
"""The name of weights of layers with experts; the others have one MLP."""


@register
@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """A Llama with a mixture of experts instead of its MLPs: Mixtral, Qwen 3 MoE, OLMoE."""

    kind: Literal["mixture"] = "mixture"
    """Architecture of the model."""
    experts: Annotated[Count, Elsewhere("num-experts num-local-experts n-routed-experts")] = 8
    """Experts of a layer, E: gated MLPs."""
    experts_per_token: Annotated[Count, Elsewhere("moe-router-topk num-experts-per-tok")] = 2
    """Experts that a token takes, those with the best scores, k."""
    expert_width: Annotated[Count | None, By("width_of_expert"), Elsewhere("moe-ffn-hidden-size")] = None
    """Width of an expert; that of the MLP (feed_forward) when not given."""
    dense_layers: Annotated[CountOrZero, Elsewhere("first-k-dense-replace")] = 0
    """The first layers, so many, have one MLP, of width feed_forward, instead of experts (DeepSeek-V3: 3)."""
    expert_interval: Annotated[Count, Elsewhere("moe-layer-freq decoder-sparse-step")] = 1
    """Of so many layers the last has experts, and the others have one MLP, of width feed_forward; 1: all have experts,
    2: every second one."""
    grouped: Annotated[Literal["auto", "pallas", "xla"], Elsewhere("moe-grouped-gemm")] = "auto"
    """Kernel of the products of experts: auto takes pallas on an NVIDIA GPU, and elsewhere xla, which runs one product
    after the other."""
    router: Annotated[Literal["softmax", "sigmoid"], Elsewhere("moe-router-score-function")] = "softmax"
    """Function from the router's scores to the weights of the experts: a softmax over all of them, or a sigmoid of each
    (DeepSeek-V3, arXiv 2412.19437)."""
    router_normalized: bool = True
    """Divide the weights of a token's experts by their sum. With softmax it is the same as a softmax over the scores of
    those k only (Mixtral)."""
    router_scale: Annotated[Positive, Elsewhere("moe-router-topk-scaling-factor routed-scaling-factor")] = 1.0
    """Factor of the weights (DeepSeek-V3: 2.5)."""
    router_groups: Count = 1
    """Groups of neighbouring experts: a token first chooses groups, by the sum of their two best scores, and then
    experts in them (DeepSeek-V3)."""
    router_top_groups: Count | None = None
    """Groups that a token chooses; all when not given."""
    shared_width: Annotated[CountOrZero, Elsewhere("moe-shared-expert-intermediate-size")] = 0
    """Width of the shared expert, which every token takes besides the others, of several together; 0: none."""
    balance_loss: Annotated[Tuned, Elsewhere("moe-aux-loss-coeff router-aux-loss-coef")] = 0.0
    """Coefficient of the loss that balances experts, of every layer: E · Σ f P, with f the share of assignments and P
    the mean weight of an expert, over what balance_over says; 1 when balanced."""
    balance_bias: Annotated[Tuned, Elsewhere("moe-router-bias-update-rate moe-router-enable-expert-bias")] = 0.0
    """Balance experts without a loss (DeepSeek-V3; arXiv 2408.15664): a step moves the bias with which an expert is
    chosen by so much, up if it had fewer tokens than the mean of its layer, down if more; 0.001 there, 0: no bias."""
    balance_over: Annotated[Literal["sequence", "micro_batch"], TUNING] = "sequence"
    """Tokens that the balance loss compares: those of each sequence, which depends on neither mesh nor micro-batch; or,
    as Megatron's aux_loss, those of a micro-batch, which change with train.micro_batch and the mesh."""
    z_loss: Annotated[Tuned, Elsewhere("moe-z-loss-coeff")] = 0.0
    """Coefficient of the mean of logsumexp(scores)² over tokens, of every layer: keeps the router's scores small
    (arXiv 2202.08906)."""

    title: ClassVar[str] = "a mixture of experts"
    module: ClassVar[str] = "mjax.models.mixture.model:Mixture"
    families: ClassVar[str] = "mjax.models.mixture.huggingface:FAMILIES"

    @property
    def width_of_expert(self) -> int:
        """Width of an expert."""
        return self.mlp_width if self.expert_width is None else self.expert_width

    @property
    def grouped_kernel(self) -> str:
        """The kernel of the products of experts, of `auto` the one that runs everywhere (`step/kernels.py` chooses)."""
        return "xla" if self.grouped == "auto" else self.grouped

    def with_grouped(self, kernel: str) -> Self:
        return replace(self, grouped=kernel)

    @property
    def top_groups(self) -> int:
        """Groups that a token chooses."""
        return self.router_groups if self.router_top_groups is None else self.router_top_groups

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return (self.layers - self.dense_layers) // self.expert_interval

    @property
    def pattern(self) -> Pattern:
        windows, interval, dense = super().pattern.group, self.expert_interval, self.dense_layers
        kinds = [windows[i % len(windows)] for i in range(dense + math.lcm(len(windows), interval))]
        for i in range(dense + interval - 1, len(kinds), interval):
            kinds[i] = kinds[i]._replace(weights=EXPERTS)
        return Pattern(tuple(kinds[dense:]), tuple(kinds[:dense]))

    def columns(self) -> dict[str, int]:
        found = {**super().columns(), "expert width": self.width_of_expert}
        if self.expert_layers == self.layers:
            del found["feed-forward width"]
        return found | ({"shared expert width": self.shared_width} if self.shared_width else {})

    def parted_experts(self) -> int:
        return self.experts

    def taken_experts(self) -> int:
        return self.experts_per_token

    def check(self, config) -> None:
        super().check(config)
        self._check_router()
        if self.expert_layers < 1:
            raise UsageError(
                f"--model.dense-layers {self.dense_layers} and --model.expert-interval {self.expert_interval} leave no "
                f"layer of --model.layers {self.layers} with experts; lower them, or use --model.kind llama"
            )
        if self.norms == "post":
            raise UsageError("--model.norms post is not there for a mixture of experts; leave it out")
        if config.precision.compute == "fp8":
            raise UsageError(
                "--precision.compute fp8 is not there for a mixture of experts, whose grouped products are in bf16; "
                "use --precision.compute bf16"
            )

    def _check_router(self) -> None:
        in_groups = self.experts // self.router_groups * self.top_groups
        if self.experts % self.router_groups or not 1 <= self.top_groups <= self.router_groups:
            raise UsageError(
                f"--model.router-groups {self.router_groups} and --model.router-top-groups {self.top_groups} do not "
                f"cut {self.experts} experts into groups of which that many can be chosen; use a divisor of "
                f"--model.experts {self.experts}, and at most as many"
            )
        if self.router_groups > 1 and self.experts // self.router_groups < 2:
            raise UsageError(
                f"--model.router-groups {self.router_groups} leaves one expert a group, and a group is scored by its "
                f"best two; use at most {self.experts // 2}"
            )
        if self.experts_per_token > in_groups:
            raise UsageError(
                f"--model.experts-per-token {self.experts_per_token} is more than the {in_groups} experts that a token "
                "can choose from; lower it, or raise --model.experts"
            )
        if self.balance_bias and self.experts_per_token == self.experts:
            raise UsageError(
                f"--model.balance-bias {self.balance_bias:g} does nothing where a token takes all {self.experts} "
                "experts; leave it out, or lower --model.experts-per-token"
            )
