"""Config fields of the parts of models; the config of a model derives from its parts. No JAX is imported here."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from mjax.config.bounds import Bounds, Count, CountOrZero, Positive
from mjax.config.marks import ANY_FAMILY, FILE_ONLY, FREE, HEADS, NEW_RUN, TUNING, WIDE, By, Synonyms
from mjax.config.model import AttentionDropout, FeedForward, Gelu, ModelConfig, Tuned
from mjax.config.pattern import LayerKind, Pattern
from mjax.errors import UsageError, either

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
EXPERTS = "experts"  # name of the weights of layers with experts; other layers have one MLP
CAPACITY = 1.25
"""Rows that a rank can send to each other rank in one round of the all-to-all of experts, relative to equal shares."""


class Hop(NamedTuple):
    """An all-to-all on the way of tokens to experts, in groups of `ranks` ranks with this stride; in a round each sends
    up to `rows` rows to each."""

    ranks: int
    stride: int
    rows: int


@dataclass(frozen=True)
class GroupedQueryConfig(ModelConfig):
    """Grouped-query attention, with a window in all or some layers."""

    kv_heads: Annotated[Count | None, By("groups"), HEADS, Synonyms("query-groups key-value-heads")] = None
    """Heads of keys and values, k (by default heads). Each serves heads / kv_heads adjacent query heads (grouped-query
    attention, arXiv 2305.13245)."""
    head_dim: Annotated[Count | None, By("head_size"), Synonyms("kv-channels")] = None
    """Attention head size, d_h (by default hidden / heads)."""
    window: Annotated[Count | None, TUNING, Synonyms("sliding-window window~")] = None
    """Tokens that a position attends to, including itself: sliding window (by default all tokens before it)."""
    global_attention_interval: Annotated[Count | None, TUNING] = None
    """The last layer in each group of this many has no window (by default no such layer). 2 alternates, 4 is OLMo 3."""
    attention_dropout: AttentionDropout = 0.0
    """Dropout rate on attention probabilities. Above 0 the cuDNN flash kernel cannot be used."""

    @property
    def groups(self) -> int:
        """Heads of keys and values, k."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def pattern(self) -> Pattern:
        if self.global_attention_interval is None:
            return super().pattern
        return Pattern((LayerKind(self.window),) * (self.global_attention_interval - 1) + (LayerKind(),))

    def column_sizes(self) -> dict[str, int]:
        return {"key-value heads": self.groups}

    def check(self, config) -> None:
        super().check(config)
        if self.global_attention_interval is not None and self.window is None:
            interval = f"--model.global-attention-interval {self.global_attention_interval}"
            raise UsageError(f"{interval} does nothing without a window; add --model.window, such as 4096")
        if self.heads % self.groups:
            fix = either(number for number in range(1, self.heads + 1) if self.heads % number == 0)
            raise UsageError(f"--model.kv-heads {self.groups} does not divide --model.heads {self.heads}; use {fix}")


@dataclass(frozen=True)
class RotaryConfig(ModelConfig):
    """Rotary positions."""

    rope_theta: Annotated[Positive, NEW_RUN, Synonyms("rotary-base")] = 10_000.0
    """Base of the rotary frequencies, θ (arXiv 2104.09864)."""
    rope_scaling: Annotated[RopeScaling, TUNING] = "none"
    """Scaling of the frequencies for sequences longer than in pretraining: linear, as in Llama 3.1, or YaRN (arXiv
    2309.00071)."""
    rope_factor: Annotated[float, Bounds(ge=1), TUNING, Synonyms("rope-scaling-factor")] = 1.0
    """Scaling factor: the new length / the length of pretraining."""
    rope_original_length: Annotated[Count | None, TUNING] = None
    """Positions of pretraining, for llama3 and yarn."""

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated."""
        return self.head_size

    @property
    def unscaled_sequence(self) -> int:
        return self.rope_original_length or round(self.max_positions / self.rope_factor)

    def check(self, config) -> None:
        super().check(config)
        if self.rotary_dim % 2 or not self.rotary_dim:
            odd = f"pairs of dims are rotated, and here {self.rotary_dim} of a head's {self.head_size}"
            raise UsageError(f"{odd}; make it even by --model.head-dim and --model.rotary-percent")
        if self.rope_scaling == "none" and self.rope_factor != 1:
            scaling = "--model.rope-scaling none; add --model.rope-scaling yarn, llama3 or linear"
            raise UsageError(f"--model.rope-factor {self.rope_factor:g} does nothing with {scaling}")
        if self.rope_scaling in ("llama3", "yarn") and self.rope_original_length is None:
            needs = "needs the length of pretraining; add --model.rope-original-length, such as 8192"
            raise UsageError(f"--model.rope-scaling {self.rope_scaling} {needs}")


@dataclass(frozen=True)
class MLPConfig(ModelConfig):
    """An MLP with GELU."""

    feed_forward: FeedForward = None
    """Width of the MLP, f (by default 4 × hidden)."""
    activation: Annotated[Gelu, FILE_ONLY, TUNING, Synonyms("activation-function")] = "gelu_tanh"
    """GELU of the MLP: the tanh form of GPT-2 and Megatron's fused kernel, or the exact one."""

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, f."""
        return 4 * self.hidden if self.feed_forward is None else self.feed_forward

    def columns(self) -> dict[str, int]:
        return {**super().columns(), "feed-forward width": self.mlp_width}


@dataclass(frozen=True)
class GatedMLPConfig(ModelConfig):
    """An MLP with a gate."""

    feed_forward: FeedForward = None
    """Width of the MLP, f (by default 8/3 × hidden, rounded up to a multiple of 256)."""

    activation = "silu"

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, f."""
        return -(-8 * self.hidden // 768) * 256 if self.feed_forward is None else self.feed_forward

    def columns(self) -> dict[str, int]:
        return {**super().columns(), "feed-forward width": self.mlp_width}


@dataclass(frozen=True)
class ExpertsConfig(GatedMLPConfig):
    """Layers with experts, and layers with one MLP."""

    experts: Annotated[Count, Synonyms("experts local-experts n-routed-experts")] = 8
    """Experts per layer, E, which are gated MLPs."""
    experts_per_token: Annotated[Count, Synonyms("moe-router-topk experts-per-tok")] = 2
    """Experts each token is routed to, those with the best scores, k."""
    moe_ffn_hidden: Annotated[Count | None, By("expert_width"), WIDE, Synonyms("moe-ffn-hidden moe-intermediate")] = (
        None
    )
    """Expert width (by default feed_forward)."""
    first_dense_layers: Annotated[CountOrZero, Synonyms("first-k-dense-replace")] = 0
    """First layers that have one MLP, of width feed_forward, instead of experts (DeepSeek-V3: 3)."""
    moe_layer_freq: Annotated[Count, Synonyms("decoder-sparse-step")] = 1
    """The last layer in each group of this many has experts, the others one MLP of width feed_forward. 1: all layers
    have experts. 2: every second layer."""
    moe_kernel: Annotated[Literal["auto", "pallas", "xla"], Synonyms("moe-grouped-gemm")] = "auto"
    """Kernel of the grouped matmuls of experts. auto: pallas on an NVIDIA GPU, elsewhere xla, which runs one matmul
    after the other."""
    moe_token_dispatcher: Annotated[
        Literal["auto", "allgather", "alltoall"], FREE, NEW_RUN, ANY_FAMILY, Synonyms("moe-token-dispatcher-type")
    ] = "auto"
    """How tokens reach the experts of other ranks of mesh.expert. allgather: every rank gathers all tokens. alltoall:
    only to the ranks of their experts, in as many rounds as the router's choice needs; no token is dropped. auto: the
    one that sends less if experts are balanced."""
    router: Annotated[Literal["softmax", "sigmoid"], Synonyms("moe-router-score-function")] = "softmax"
    """Weights of the experts: the softmax of the router's scores, or their sigmoid (DeepSeek-V3, arXiv 2412.19437)."""
    router_normalized: bool = True
    """Divide the weights of the selected experts by their sum. With softmax, this is a softmax over the selected scores
    (Mixtral)."""
    router_scale: Annotated[Positive, Synonyms("moe-router-topk-scaling-factor routed-scaling-factor")] = 1.0
    """Factor of the weights (DeepSeek-V3: 2.5)."""
    router_n_groups: Annotated[Count, Synonyms("moe-router-num-groups n-group")] = 1
    """Groups of adjacent experts: a token first selects groups and then experts in them."""
    router_topk_groups: Annotated[Count | None, By("top_groups"), Synonyms("moe-router-group-topk topk-group")] = None
    """Groups that a token selects (by default all)."""
    router_group_best: Count = 2
    """Best scores of a group whose sum selects it (DeepSeek-V3: 2, DeepSeek-V2: 1)."""
    router_bias: Annotated[bool, Synonyms("moe-router-enable-expert-bias")] = False
    """Choose experts by their scores plus a bias, which training leaves as it is, as after an import of GLM-4.5."""
    shared_expert_ffn_hidden: Annotated[CountOrZero, WIDE, Synonyms("moe-shared-expert-intermediate")] = 0
    """Total width of the shared experts, which every token uses (0: none)."""
    aux_loss_coef: Annotated[Tuned, Synonyms("moe-aux-loss-coeff router-aux-loss-coef")] = 0.0
    """Coefficient of each layer's load-balancing loss, E · Σ f P over experts: f is the expert's share of assignments,
    P its mean weight. Balanced experts give 1."""
    router_bias_update_rate: Annotated[Tuned, Synonyms("moe-router-bias-update-rate")] = 0.0
    """Balance experts without a loss: change per step in the router's bias, up for an expert below its layer's mean
    load, down above (DeepSeek-V3: 0.001, arXiv 2408.15664)."""
    aux_loss_scope: Annotated[Literal["sequence", "micro_batch"], TUNING] = "sequence"
    """Tokens over which the load-balancing loss averages. sequence: each sequence, independent of mesh and micro-batch.
    micro_batch: the micro-batch, as Megatron's aux_loss, which depends on train.micro_batch and the mesh."""
    z_loss: Annotated[Tuned, Synonyms("moe-z-loss-coeff")] = 0.0
    """Coefficient of the z-loss per layer, the mean of logsumexp(scores)² over tokens. It keeps the scores small (arXiv
    2202.08906)."""

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.mlp_width if self.moe_ffn_hidden is None else self.moe_ffn_hidden

    @property
    def top_groups(self) -> int:
        """Groups that a token selects."""
        return self.router_n_groups if self.router_topk_groups is None else self.router_topk_groups

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return (self.layers - self.first_dense_layers) // self.moe_layer_freq

    def token_dispatcher(self, ranks: int) -> Literal["local", "allgather", "alltoall"]:
        """`moe_token_dispatcher` with auto resolved, for `ranks` ranks of `expert`; `local` if one rank has all."""
        if ranks == 1:
            return "local"
        if self.moe_token_dispatcher != "auto":
            return self.moe_token_dispatcher
        return "alltoall" if ranks > CAPACITY * self.experts_per_token else "allgather"

    def hops(self, tokens: int, ranks: int) -> tuple[Hop, ...]:
        """The all-to-alls of these tokens of a rank to the experts of `ranks` ranks of `expert`: one, or two if the
        router limits a token to fewer groups than experts, and several ranks hold each group: a node.
        """
        groups, limit, chosen = self.router_n_groups, self.top_groups, self.experts_per_token
        rows = lambda sent, parts: math.ceil(CAPACITY * sent * tokens / parts)  # noqa: E731
        if limit >= min(groups, chosen) or ranks == groups or ranks % groups:
            return (Hop(ranks, 1, rows(chosen, ranks)),)
        in_node = ranks // groups
        return Hop(groups, in_node, min(tokens, rows(limit, groups))), Hop(in_node, 1, rows(chosen, in_node))

    @property
    def routers(self) -> int:
        """Routers of the model, one for each layer with experts."""
        return self.expert_layers

    @property
    def has_router_bias(self) -> bool:
        """True if routers have a bias, by which experts are chosen."""
        return self.router_bias or self.router_bias_update_rate > 0

    @property
    def pattern(self) -> Pattern:
        windows, interval, dense = super().pattern.group, self.moe_layer_freq, self.first_dense_layers
        kinds = [windows[i % len(windows)] for i in range(dense + math.lcm(len(windows), interval))]
        for i in range(dense + interval - 1, len(kinds), interval):
            kinds[i] = kinds[i]._replace(weights=EXPERTS)
        return Pattern(tuple(kinds[dense:]), tuple(kinds[:dense]))

    def columns(self) -> dict[str, int]:
        sizes = {**super().columns(), "expert width": self.expert_width}
        if self.expert_layers == self.layers:
            del sizes["feed-forward width"]
        return sizes | ({"shared expert width": self.shared_expert_ffn_hidden} if self.shared_expert_ffn_hidden else {})

    def check(self, config) -> None:
        super().check(config)
        if self.expert_layers < 1:
            none = f"leave no layer of --model.layers {self.layers} with experts; lower them, or use --model.kind llama"
            dense = f"--model.first-dense-layers {self.first_dense_layers}"
            raise UsageError(f"{dense} and --model.moe-layer-freq {self.moe_layer_freq} {none}")
        if config.precision.compute == "fp8":
            fp8 = "--precision.compute fp8 is not supported for a mixture of experts (grouped matmuls run in bf16)"
            raise UsageError(f"{fp8}; use --precision.compute bf16")
        in_groups, several = self.experts // self.router_n_groups * self.top_groups, self.router_n_groups > 1
        least = self.router_group_best
        uneven = self.experts % self.router_n_groups or (several and self.experts < least * self.router_n_groups)
        if uneven or not 1 <= self.top_groups <= self.router_n_groups:
            flags = f"--model.router-n-groups {self.router_n_groups} and --model.router-topk-groups {self.top_groups}"
            fix = f"use a divisor of --model.experts {self.experts}, and at most as many"
            raise UsageError(f"{flags} do not cut {self.experts} experts into groups of {least} or more; {fix}")
        if self.experts_per_token > in_groups:
            flag = f"--model.experts-per-token {self.experts_per_token}"
            most = f"is more than the {in_groups} experts that a token can choose from"
            raise UsageError(f"{flag} {most}; lower it, or raise --model.experts")
        if self.router_bias_update_rate and self.experts_per_token == self.experts:
            rate = f"--model.router-bias-update-rate {self.router_bias_update_rate:g}"
            fix = "remove it, or lower --model.experts-per-token"
            raise UsageError(f"{rate} does nothing where a token uses all {self.experts} experts; {fix}")
