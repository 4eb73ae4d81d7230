"""megatron-core's mixtures of experts: what their arguments mean here, and the experts of all ranks by one number.

In the format `torch` each of q expert ranks has a file with E / q neighbouring experts, in one of three layouts. The
numbers in names are the rank's own, from 0; after `gathered` they count over all ranks.

    experts.local_experts.3.linear_fc1.weight   [2 · f, h]             SequentialMLP: gate, then up
    experts.linear_fc1.weight3                  [2 · f, h]             TEGroupedMLP
    experts.weight1                             [h, (E / q) · 2 · f]   GroupedMLP: the numbers of [E / q, h, 2 · f]

`linear_fc2` and `weight2` likewise. In the format `torch_dist` all three are stored alike (`distributed.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mjax.errors import UsageError
from mjax.interop.megatron.arguments import PLAIN
from mjax.interop.megatron.ranks import Share
from mjax.interop.tensor_files import Tensors

# --- Arguments --------------------------------------------------------------------------------------------------------

EXPERT = "mlp.experts.0.linear_fc2"
"""The module whose weight [h, f] says how wide an expert is."""
NOT_HERE = {
    "moe_router_enable_expert_bias": "mjax convert does not read the bias of a router",
    "moe_shared_expert_gate": "the shared expert of mjax has no gate",
    "moe_apply_probs_on_input": "mjax multiplies by the weight of an expert after its activation",
    "moe_latent_size": "the experts of mjax read the hidden size",
    "moe_input_jitter_eps": "mjax adds no noise to the router's input, which Megatron does in evaluation too",
    "moe_router_force_load_balancing": "the router of mjax does not choose at random",
    "moe_router_topk_limited_devices": "its groups depend on the ranks of the run; mjax reads moe_router_group_topk",
    "moe_token_dropping": "mjax drops no token",
    "moe_extended_tp": "it splits experts in another way",
}
"""Arguments that change what the model computes, or how its files are split; mjax reads models without them."""
OVER = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence"}
"""moe_router_load_balancing_type → our balance_over. Both are E / (k T²) · Σ_i (Σ_t p_ti)(tokens of expert i), of every
layer, with T the tokens of a micro-batch or of a sequence, and the mean over these. So the coefficients are ours."""
LOSSES = (*OVER, "global_aux_loss", "none")


def mixture_fields(said: Mapping[str, Any], tensors: Tensors, width: int, source: str) -> dict[str, Any]:
    """The fields of a `MixtureConfig` that a Llama does not have, and the width of the MLP.

    Args:
      said: the arguments of the run, after `check_experts`.
      tensors: by current names.
      width: of an expert, by its shape.
      source: the checkpoint, for messages.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, or contradict the tensors.
    """
    router = tensors.kinds.get("decoder.layers.0.mlp.router.weight")
    there = {"num_experts": router.shape[0] if router is not None and router.shape else 0}
    there |= {"moe_ffn_hidden_size": width}
    for name, known in there.items():
        if said.get(name) not in (None, known):
            raise UsageError(
                f"{source}: {name} is {said[name]!r} among the arguments, and {known} by the tensors; "
                "copy the whole checkpoint"
            )
    score, chosen = said.get("moe_router_score_function") or "softmax", _count(said, "moe_router_topk", source, 2)
    if score not in ("softmax", "sigmoid"):
        raise UsageError(
            f"{source}: moe_router_score_function is {score!r}, and mjax knows softmax and sigmoid; "
            "convert another model"
        )
    feed_forward = _count(said, "ffn_hidden_size", source, width)
    return {
        "experts": there["num_experts"],
        "experts_per_token": chosen,
        "feed_forward": feed_forward,
        "expert_width": None if feed_forward == width else width,
        "router": score,
        # A softmax after the choice is the one before it, divided by the sum of those chosen.
        "router_normalized": chosen > 1 if score == "sigmoid" else not said.get("moe_router_pre_softmax"),
        "router_scale": _number(said, "moe_router_topk_scaling_factor", source) or 1.0,
        "shared_width": _count(said, "moe_shared_expert_intermediate_size", source, 0),
        "z_loss": _number(said, "moe_z_loss_coeff", source),
        **_groups(said, score, chosen, source),
        **_balance(said, source)[0],
    }


def balance_left_out(said: Mapping[str, Any], source: str) -> str:
    """One line about a balance loss that mjax does not have; empty if there is none."""
    return _balance(said, source)[1]


def check_experts(said: Mapping[str, Any], source: str) -> None:
    """Refuse arguments with which Megatron's experts compute something that those of mjax do not."""
    for name, value in said.items():
        if name.startswith("moe_") and not isinstance(value, PLAIN):
            raise UsageError(f"{source}: {name} is a {type(value).__name__}; restore the checkpoint")
        if name in NOT_HERE and value:
            raise UsageError(f"{source}: {name} is {value!r}, and {NOT_HERE[name]}; convert a model without it")
    capacity = said.get("moe_expert_capacity_factor")
    if capacity is not None and not (type(capacity) in (int, float) and capacity < 0):
        raise UsageError(
            f"{source}: moe_expert_capacity_factor is {capacity!r}, with which Megatron drops tokens, and mjax drops "
            "none; convert a model without it"
        )
    frequency = said.get("moe_layer_freq")
    if any(type(each) is not int or each != 1 for each in _listed(1 if frequency is None else frequency)):
        raise UsageError(
            f"{source}: moe_layer_freq is {frequency!r}, and mjax convert reads those whose layers all have "
            "experts, as with 1; convert a model without dense layers"
        )


def _groups(said: Mapping[str, Any], score: str, chosen: int, source: str) -> dict[str, int]:
    """Groups of experts; Megatron scores one by the sum of its best moe_router_topk / moe_router_group_topk, mjax by
    that of its best two."""
    top = _count(said, "moe_router_group_topk", source, 0)
    groups = _count(said, "moe_router_num_groups", source, 1) or 1
    if top in (0, groups):  # every expert can be chosen
        return {}
    if chosen // top != 2:
        raise UsageError(
            f"{source}: moe_router_topk {chosen} and moe_router_group_topk {top} score a group by its best "
            f"{chosen // top} experts, and mjax by its best 2; convert another model"
        )
    if score == "softmax" and not said.get("moe_router_pre_softmax"):
        raise UsageError(
            f"{source}: moe_router_group_topk is {top} without moe_router_pre_softmax, which scores groups before the "
            "softmax, and mjax scores them after it; convert another model"
        )
    return {"router_groups": groups, "router_top_groups": top}


def _balance(said: Mapping[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Our fields for the balance loss, and one line about a loss that they cannot say."""
    kinds, name = _listed(said.get("moe_router_load_balancing_type") or "aux_loss"), "moe_aux_loss_coeff"
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in LOSSES]:
        raise UsageError(
            f"{source}: moe_router_load_balancing_type is {unknown[0]!r}, and mjax knows {', '.join(LOSSES)}; "
            "convert another model"
        )
    numbers = [_number({name: each}, name, source) for each in _listed(said.get(name) or 0.0)]
    if len(numbers) != len(kinds):
        raise UsageError(
            f"{source}: {name} has {len(numbers)} numbers and moe_router_load_balancing_type {len(kinds)} losses; "
            "copy the checkpoint again"
        )
    losses = {kind: number for kind, number in zip(kinds, numbers, strict=True) if number and kind != "none"}
    if not losses:
        return {}, ""
    # Megatron's losses count the best experts of all groups, whichever a token takes.
    in_groups = said.get("moe_router_group_topk") not in (None, 0, said.get("moe_router_num_groups"))
    if len(losses) == 1 and losses.keys() <= OVER.keys() and not in_groups:
        ((kind, number),) = losses.items()
        return {"balance_loss": number, "balance_over": OVER[kind]}, ""
    listed = " and ".join(f"{kind} {number:g}" for kind, number in losses.items())
    return {}, (
        f"balance loss: mjax has no {listed}{' with groups of experts' if in_groups else ''}, so the run has none; to "
        "train on with the one of mjax, add --model.balance-loss"
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _count(said: Mapping[str, Any], name: str, source: str, default: int) -> int:
    value = default if said.get(name) is None else said[name]
    if type(value) is not int or value < 0:
        raise UsageError(f"{source}: {name} is {value!r}, not a whole number; copy the checkpoint again")
    return value


def _number(said: Mapping[str, Any], name: str, source: str) -> float:
    value = 0.0 if said.get(name) is None else said[name]
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise UsageError(f"{source}: {name} is {value!r}, not a number from 0 on; copy the checkpoint again")
    return float(value)


# --- Expert ranks -----------------------------------------------------------------------------------------------------

EXPERTS = ".mlp.experts."


def gathered(shares: Sequence[Share], source: str) -> Share:
    """What the expert ranks of one tensor rank hold, as one share with a tensor for each matrix of each expert.

    Args:
      shares: in the order of expert ranks, by current names; all but experts is the same in each.
      source: the checkpoint, for messages.

    Raises:
      UsageError: the ranks do not fit together, or a tensor does not fit the number of experts.
    """
    found = {name: array for name, array in shares[0].items() if EXPERTS not in name}
    others = set(found)
    for rank, share in enumerate(shares):
        if odd := others ^ {name for name in share if EXPERTS not in name}:
            raise UsageError(
                f"{source}: of expert ranks 0 and {rank} only one holds {min(odd)}; copy the whole checkpoint"
            )
        for name, array in share.items():
            if EXPERTS not in name:
                continue
            before, _, part = name.partition(EXPERTS)
            router = share.get(f"{before}.mlp.router.weight")
            if router is None or router.ndim != 2 or len(router) % len(shares):
                raise UsageError(
                    f"{source}: {before}.mlp.router.weight does not say how many experts each of {len(shares)} expert "
                    "ranks has; copy the whole checkpoint"
                )
            own = len(router) // len(shares)
            for number, rest, tensor in _of_rank(part, array, own, router.shape[1]):
                whole = f"{before}{EXPERTS}{rank * own + number}.{rest}"
                if whole in found:
                    raise UsageError(
                        f"{source}: two expert ranks hold {whole}, rank {rank} the second time; "
                        "copy the whole checkpoint again"
                    )
                found[whole] = tensor
    return found


def _of_rank(part: str, array: np.ndarray, own: int, hidden: int) -> Iterator[tuple[int, str, np.ndarray]]:
    """The matrices in one tensor of a rank with so many experts of its own: number, rest of the name, [out, in]."""
    if found := re.fullmatch(r"local_experts\.(\d+)\.(.+)", part):
        yield int(found[1]), found[2], array
    elif found := re.fullmatch(r"(linear_fc[12])\.(weight|bias)(\d+)", part):
        yield int(found[3]), f"{found[1]}.{found[2]}", array
    elif part in ("weight1", "weight2") and array.size % (own * hidden) == 0:
        shape = (own, hidden, -1) if part == "weight1" else (own, -1, hidden)
        for number, matrix in enumerate(array.reshape(shape)):
            yield number, f"linear_fc{part[-1]}.weight", matrix.T
    else:  # refused by its name with the other tensors that are not the model's
        yield 0, part, array
