"""Loss and every gradient of the parallel step against the serial reference in float64, which shares no code with it.

`table.txt` has a row for every run that is compared. Every two choices that can meet do so in one row at least: a new
option is a new column there, in `Case` and in `CHOICES`, and `test_every_two_choices_meet` prints the rows to add. The
first rows run in `make test`, with 58% of the pairs. Up to ROWS_OF_CI they run in CI, with 98%, and the others in
`make test-all`.
"""

from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from mjax.config.checks import validate
from mjax.errors import UsageError
from tests.against_reference import largest_error, update_errors
from tests.small import BLOOM, small_config

# --- The table --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A row of the table: what is chosen in each dimension of a run."""

    architecture: str
    data: int
    model: int
    pipe: int
    context: int
    context_attention: str
    expert: int
    schedule: str
    virtual_stages: int
    zero: int
    sequence_parallel: bool
    micro_batches: int
    recompute: str
    dropout: float
    packed: bool
    kernel: str
    layers: str
    loss_chunks: int
    lora: str
    replicate: int


LLAMA = {"kind": "llama", "kv_heads": 4, "feed_forward": 24}
MIXTURE = {
    "kind": "mixture",
    "moe_kernel": "xla",
    "experts": 4,
    "moe_ffn_hidden": 24,
    "aux_loss_coef": 0.1,
    "z_loss": 0.01,
}
DEEPSEEK = {
    "experts": 8, "experts_per_token": 3, "router": "sigmoid", "router_n_groups": 4, "router_topk_groups": 2,
    "router_scale": 2.5, "shared_expert_ffn_hidden": 20, "router_bias_update_rate": 0.01,
}  # fmt: skip
YARN = {
    "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 1024, "rope_theta": 50.0, "head_dim": 16,
    "rotary_percent": 0.5,
}  # fmt: skip
YARN_3 = {
    "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 64, "rope_theta": 50.0, "rope_mscale": 0.7,
    "rope_beta_fast": 8.0,
}  # fmt: skip
GEMMA_3 = {
    "kind": "gemma3", "kv_heads": 4, "feed_forward": 24, "head_dim": 6, "window": 3, "rope_theta": 50.0,
    "local_rope_theta": 5.0, "rope_scaling": "linear", "rope_factor": 2.0, "query_pre_attn_scalar": 5,
    "init_std": 0.3,
}  # fmt: skip
LLAMA_31 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 8, "rope_theta": 50.0}
ARCHITECTURES = {
    "gpt": {},
    "bloom": {**BLOOM, "heads": 12},  # no power of two, and divided by 4 ranks
    "pre-LN": {"kind": "bert", "layernorm": "pre", "activation": "gelu_erf"},
    "post-LN": {"kind": "bert", "layernorm": "post", "mlm_activation": "gelu_erf"},
    "classification": {"head": "classification", "num_labels": 3},
    "choices": {"head": "multiple_choice", "num_labels": 2, "layernorm": "post"},
    "span": {"head": "span"},
    "llama": {**LLAMA, "rope_scaling": "linear", "rope_factor": 2.0},
    "llama-3.1": {**LLAMA, **LLAMA_31},
    "mistral": {**LLAMA, "window": 5},
    "alternating": {**LLAMA, "window": 3, "global_attention_interval": 2},
    "qwen-2": {**LLAMA, "qkv_bias": True, "tie_embeddings": True},
    "qwen-3": {**LLAMA, "qk_norm": "head", "head_dim": 6},
    "olmo-2": {**LLAMA, "kv_heads": None, "qk_norm": "heads", "norms": "post"},
    "one-kv-head": {**LLAMA, "kv_heads": 1, "qk_norm": "heads"},
    "two-kv-heads": {**LLAMA, "kv_heads": 2, "qk_norm": "head", "qkv_bias": True},
    "gemma-3": {**GEMMA_3, "global_attention_interval": 2},
    "yarn": {**LLAMA, **YARN, "activation": "gelu_tanh"},
    "mixtral": {**MIXTURE, "router_normalized": False, "kv_heads": 4},
    "deepseek": {**MIXTURE, **DEEPSEEK},
    "first-dense": {**MIXTURE, "first_dense_layers": 1, "feed_forward": 40},
    "every-second": {**MIXTURE, "moe_layer_freq": 2, "feed_forward": 40},
}
LATENT = {
    **MIXTURE, "kind": "deepseek", "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "experts": 8, "experts_per_token": 3, "shared_expert_ffn_hidden": 20, "init_std": 0.1,
}  # fmt: skip
ARCHITECTURES |= {
    "deepseek-2": {**LATENT, "first_dense_layers": 1, "feed_forward": 40, "router_normalized": False},
    "deepseek-3": {
        **LATENT, **DEEPSEEK, **YARN_3, "q_lora_rank": 14, "mtp_layers": 1, "mtp_loss_coef": 0.5,
    },
}  # fmt: skip
CHOICES = Case(
    architecture=tuple(ARCHITECTURES),
    data=(1, 2, 4),
    model=(1, 2, 4),
    pipe=(1, 2, 4),
    context=(1, 2, 4),
    context_attention=("-", "ulysses", "allgather"),
    expert=(1, 2, 4),
    schedule=("-", "gpipe", "1f1b"),
    virtual_stages=(1, 2),
    zero=(0, 1, 3),
    sequence_parallel=(False, True),
    micro_batches=(1, 2, 4),
    recompute=("none", "selective", "full", "offload"),
    dropout=(0.0, 0.1),
    packed=(False, True),
    kernel=("xla", "xla_blocks"),
    layers=("loop", "apart"),
    loss_chunks=(1, 3),
    lora=("-", "all", "some"),
    replicate=(1, 2),
)
LORA = {
    "-": {},
    "all": {"lora_rank": 3},
    "some": {"lora_rank": 2, "lora_alpha": 7.0, "lora_targets": ("q", "v", "down")},
}
PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}
BATCH = 16


def config_of(case):
    changes = ARCHITECTURES[case.architecture]
    period = 2 if changes.keys() & {"global_attention_interval", "moe_layer_freq"} else 1
    axes = "pipe", "context", "expert", "virtual_stages", "zero", "sequence_parallel", "replicate"
    mesh = {name: getattr(case, name) for name in axes}
    mesh |= {} if case.context_attention == "-" else {"context_attention": case.context_attention}
    mesh |= {} if case.schedule == "-" else {"schedule": case.schedule}
    samples = dict(PACKED) if case.packed else {}
    if case.architecture == "bloom":
        samples.pop("reset_positions", None)  # ALiBi counts distances
    if case.architecture == "qwen-3":
        samples.pop("reset_attention", None)  # where documents see each other, rotary positions within them matter
    lora = dict(LORA[case.lora])
    if case.lora == "some" and case.architecture == "mixtral":
        lora["lora_targets"] = ("q", "v")  # all its MLPs are experts
    if case.lora == "some" and changes.get("kind") == "deepseek":
        lora["lora_targets"] = ("kv_down", "kv_up", "down")
    return small_config(
        case.data,
        case.model,
        BATCH // case.data // case.micro_batches,
        case.recompute,
        "fp64",
        case.dropout,
        BATCH,
        mesh,
        samples,
        unroll="off" if case.layers == "loop" else "on",
        loss_chunks=case.loss_chunks,
        attention=case.kernel,
        layers=max(2, period * case.pipe * case.virtual_stages + (case.architecture == "first-dense")),
        **changes,
        **lora,
    )


ROWS_OF_TEST, ROWS_OF_CI = 23, 108


def tier_of(row):
    if row < ROWS_OF_TEST:
        return ()
    return pytest.mark.ci if row < ROWS_OF_CI else pytest.mark.all


def read_table():
    names, *lines = (line.split() for line in (Path(__file__).parent / "table.txt").read_text().splitlines())
    assert tuple(names) == Case._fields
    values = [{str(value): value for value in column} for column in CHOICES]
    rows = [Case(*(known[word] for known, word in zip(values, line, strict=True))) for line in lines]
    return [pytest.param(row, id="-".join(map(str, row)), marks=tier_of(i)) for i, row in enumerate(rows)]


TABLE = read_table()


@pytest.mark.parametrize("case", TABLE)
def test_loss_and_gradients_equal_the_serial_reference(case):
    """Loss and weights after a whole step with adapters, which changes no other weights."""
    config = config_of(case)
    # The loss scale is divided out.
    errors = update_errors(config) if config.model.lora_rank else largest_error(config, scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


def can_run(case):
    """True if only existing parts are chosen, the mesh fits on the simulated devices, and mjax accepts the config."""
    head = "head" in ARCHITECTURES[case.architecture]
    absent = (
        (case.schedule == "-") != (case.pipe == 1)
        or (case.context_attention == "-") != (case.context == 1)
        or (case.virtual_stages > 1 and case.pipe == 1)
        or (case.zero > 0 and case.data == 1)
        or (head and (case.packed or case.loss_chunks > 1))
    )
    if absent or case.data * case.model * case.pipe * case.context > 16:
        return False
    try:
        validate(config_of(case))
    except UsageError:
        return False
    return True


def simplest_row(**given):
    """The row with these values in which little else is chosen than they require."""
    found = {name: values[0] for name, values in zip(Case._fields, CHOICES, strict=True)} | given
    needed = {}
    if found["schedule"] != "-" or found["virtual_stages"] > 1:
        needed["pipe"] = 2
    if found["pipe"] > 1 or "pipe" in needed:
        needed["schedule"] = "1f1b"
    if found["virtual_stages"] > 1:
        needed["micro_batches"] = 4
    if found["context_attention"] != "-":
        needed["context"] = 2
    if found["context"] > 1:
        needed["context_attention"] = "allgather"
    if found["replicate"] > 1:
        needed["zero"] = 3
    if found["zero"] or found["expert"] > 1 or "zero" in needed:
        needed["data"] = 4
    if found["expert"] > 1:
        needed["architecture"] = "mixtral"
    if found["sequence_parallel"]:
        needed["model"] = 2
    return Case(**found | needed | given)


def test_every_two_choices_meet():
    rows = [parameter.values[0] for parameter in TABLE]
    assert all(map(can_run, rows))
    met = {pair for row in rows for pair in combinations(zip(Case._fields, row, strict=True), 2)}
    columns = list(zip(Case._fields, CHOICES, strict=True))
    every = {((a, x), (b, y)) for (a, xs), (b, ys) in combinations(columns, 2) for x in xs for y in ys}
    missing = [row for pair in every - met if can_run(row := simplest_row(**dict(pair)))]
    assert not missing, "\n".join(" ".join(map(str, row)) for row in missing)


@pytest.mark.parametrize(("zero", "unroll"), [(1, "on"), pytest.param(3, "off", marks=pytest.mark.ci)])
def test_weights_that_data_does_not_divide(zero, unroll):
    """Three replicas divide few dims of a weight: most stay whole."""
    config = small_config(3, 1, 2, "selective", "fp64", 0.1, 6, {"zero": zero}, unroll=unroll)
    assert config.model.hidden % 3
    errors = largest_error(config, scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors
