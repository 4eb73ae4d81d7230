"""A mixture of experts: a Llama whose layers have a router and experts instead of the MLP (Mixtral, arXiv
2401.04088; Qwen 3 MoE, arXiv 2505.09388; OLMoE, arXiv 2409.02060).

    x ─┬─ norm ─ attention ─ + ─┬─ norm ─ router ─ k of E experts ─ + ─▶
       └─────────────────────┘  └──────────────────────────────────┘

Some layers may have the MLP of a Llama instead: the first `first_dense_layers` (DeepSeek-V3, arXiv 2412.19437), or all
but every `moe_layer_freq`-th.
"""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from mjax.config.axes import EXPERT
from mjax.config.pattern import layer_stacks
from mjax.models.llama.model import Llama, llama_layer
from mjax.models.mixture.config import MixtureConfig
from mjax.models.parts.config import EXPERTS
from mjax.models.parts.experts import Experts
from mjax.models.parts.router import bias_update_sign
from mjax.parallel import mappings


class Mixture(Llama):
    """A decoder-only mixture of experts.

    Its auxiliary losses are means over the layers with experts. A coefficient applies to one layer's loss, so the mean
    gets the coefficient times the number of these layers.
    """

    layers: ClassVar = {"": llama_layer, EXPERTS: partial(llama_layer, mlp=Experts)}

    def __init__(self, key: Array, config: MixtureConfig, dtype=jnp.float32):
        super().__init__(key, config, dtype)
        losses = {"balance_loss": config.aux_loss_coef, "z_loss": config.z_loss}
        self.loss_weights = {"loss": 1.0} | {name: coef * config.routers for name, coef in losses.items() if coef}

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        layers = self.config.routers
        sequences = mappings.mask_count_to_first_context_rank(batch["tokens"].shape[0])
        tokens = batch["tokens"].size * layers
        counts = {"router_entropy": tokens, "z_loss": tokens, "balance_loss": sequences * layers}
        # Numbers of tokens, not a mean; exact in float32 up to 2²⁴: dividing them would round.
        counts["expert_load"] = jnp.ones((layers, self.config.experts), jnp.int32)
        if self.config.token_dispatcher(mappings.size(EXPERT)) == "alltoall":
            counts["dispatch_rounds"] = tokens
        used = {"router_entropy", "expert_load", "dispatch_rounds"} | self.loss_weights.keys()
        return super().counts(batch) | {name: count for name, count in counts.items() if name in used}

    def summary(self, means: dict[str, Array]) -> dict[str, Array]:
        """`expert_load` [l, E], the tokens of each expert, as the largest over the mean in the worst layer; and
        `expert_shares` [l, E], the share of each expert in the assignments of its layer."""
        load = means["expert_load"]
        shares = load / load.sum(-1, keepdims=True)
        return means | {"expert_load": (load.max(-1) / load.mean(-1)).max(), "expert_shares": shares}

    def adjustments(self, means: dict[str, Array]) -> dict[str, Array]:
        """The change of every router's bias, [l, E]: `router_bias_update_rate`, up or down, from `expert_load`."""
        if not self.config.router_bias_update_rate:
            return {}
        load = means["expert_load"]
        step = self.config.router_bias_update_rate * bias_update_sign(load).astype(load.dtype)
        (stack,) = (stack for stack in layer_stacks(self.config) if stack.kinds[0].weights == EXPERTS)
        return {f"{stack.name}.mlp.router.bias": step}
