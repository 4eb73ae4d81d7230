"""The dtypes of a bf16 step, and of generation in bf16, read from the traced programs.

Every operation with a 16-bit operand or result must be in `IN_16_BITS`, under the function of mjax that wrote it. The
rest is float32: rotary angles, norms, activations, softmax, cross entropy, routers, sums over rows, draws of tokens.
"""

from collections import Counter, defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mjax.generation.generate import Generator
from mjax.models.bert import model as bert
from mjax.models.gemma3 import model as gemma3
from mjax.models.llama import model as llama
from mjax.models.parts import experts, mlp
from mjax.parallel.mesh import abstract_mesh
from mjax.parallel.weights import are_stacked
from mjax.planner.program import inner_jaxprs
from tests.small import BLOOM, small_config
from tests.traced import carried, equations, traced_step, writer

CALLS = "checkpoint closed_call cond custom_jvp_call custom_vjp_call jit pjit remat2 scan shard_map while"
MOVES = """all_gather all_gather_invariant all_to_all bitcast_convert_type broadcast_in_dim concatenate copy copy_p
    dynamic_slice dynamic_update_slice gather name optimization_barrier pad ppermute psum psum_invariant pvary
    reduce_precision reduce_scatter reshape rev scatter select_n slice split squeeze stack stop_gradient tile
    transpose unstack"""
"""Operations that compute nothing on a device; sums over devices are counted in `trace/test_collectives.py`."""
IN_16_BITS = {
    "matmul": """Encoder.embed VocabParallelEmbedding.logits _attend_block _chunk_logits _matmul _vocab_logits_forward
        attend_cached chunked_cross_entropy apply_column_parallel ColumnAdapter.__call__ _kernel_gradient linear
        LatentAttention.decode""",
    # With a float32 result: scores of attention, matmuls of experts before they are rounded, the loss in chunks.
    "wide matmul": """_attend_block attend_cached chunked_cross_entropy grouped_matmul
        grouped_matmul_loop.multiply_group.multiply_tile""",
    # The residual stream, and biases.
    "add": """Block.__call__ ColumnAdapter.__call__ Encoder.embed Experts.__call__ GPT.embed
        OutputNormBlock.__call__ PostNormBlock.__call__ _vocab_logits_forward add_bias
        add_bias.add apply_column_parallel RowParallelLinear.__call__""",
    # Gradients of a value that is used twice.
    "add_any": """ColumnAdapter.__call__ Encoder.pool Router.__call__ _scan_groups.body _norm _sum_squares
        _zero_centered_rms_norm apply_column_parallel apply_gate all_gather_tokens column_parallel_input
        copy_to_region linear lookup NeighborRotary.apply_to_qk VocabParallelEmbedding.logits""",
    "mul": "ColumnAdapter.__call__ Encoder.pool Gemma3.embed RowAdapter.__call__ apply_gate",
    "tanh": "Encoder.pool",
    "sub": "Encoder.pool",  # of its gradient, with one name from jax 0.12 on
    "one_minus_square": "Encoder.pool",
    "gt": "BERT.loss",  # of an accuracy
    # Results computed in float32, weights, and gradients of widened arrays.
    "round": """BERT.loss CausalModel.loss Experts.__call__ Output.cross_entropy Router.__call__
        VocabParallelEmbedding.logits _attend_block _attend_in_blocks _dropout _dropout.mask _gather_layer _norm
        _norm.forward _rotate _rotate_by scale_rows _sum_rows _sum_squares _zero_centered_rms_norm _apply_weights
        _wide activate add_bias attend_cached chunked_cross_entropy apply_column_parallel combine
        ColumnAdapter.__call__ dispatch repeat_heads grouped_matmul lookup position_embeddings
        grouped_matmul_loop.multiply_group.multiply_tile tile_rows Storage.cast""",
    "round integers": "Encoder.embed VocabParallelEmbedding.__call__",  # 0 and 1
}


def operations(jaxpr, function=None):
    """Every operation and its writer. Bodies of `jit` are traced once in a process: their caller counts as writer."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in CALLS.split():
            yield name, equation, function or writer(equation)
            continue
        caller = function or (writer(equation) if name in ("jit", "pjit") else None)
        for body in inner_jaxprs(equation):
            yield from operations(body, caller)


def is_narrow(variable):
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize == 2


def computed_in_16_bits(jaxpr):
    """The functions that compute with 16-bit numbers, by operation."""
    found = defaultdict(set)
    for name, equation, function in operations(jaxpr):
        given, results = any(map(is_narrow, equation.invars)), any(map(is_narrow, equation.outvars))
        if name in MOVES.split() or not (given or results):
            continue
        if name == "dot_general":
            name = "matmul" if results else "wide matmul"
        elif name == "convert_element_type":
            if given or equation.invars[0].aval.weak_type:  # loses nothing; a number of Python
                continue
            name = "round" if jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating) else "round integers"
        found[name].add(function)
    return found


def traced_generation(config):
    """The loop that reads and draws tokens."""
    generator = Generator(config, abstract_mesh(config.mesh))
    weights = jax.eval_shape(generator._weights, generator.abstract_model)
    one, rows = jnp.int32(1), jnp.ones(3, jnp.int32)
    state = jax.eval_shape(partial(generator._read, 16), weights, jnp.ones((3, 8), jnp.int32), rows)
    request = {"limits": rows, "eod": rows, "temperature": jnp.float32(1), "top_k": one, "top_p": jnp.float32(1)}
    request |= {"seed": jnp.uint32(1), "streams": rows.astype(jnp.uint32)}
    return generator._write.trace(weights, request, state, one).jaxpr.jaxpr


def carried_in_16_bits(program, jaxpr):
    """Return 16-bit carries of loops in the shape of the matrices of layers: sums over micro-batches."""
    leaves = zip(jax.tree.leaves(program.abstract_state.model), are_stacked(program.abstract_state.model), strict=True)
    matrices = {leaf.sharding.shard_shape(leaf.shape) for leaf, stacked in leaves if stacked and leaf.ndim > 2}
    for loop in equations(jaxpr, "scan"):
        yield from (str(x) for x in carried(loop) if x.dtype.itemsize == 2 and x.shape in matrices)


LLAMA = {"kind": "llama", "kv_heads": 4, "feed_forward": 24}
OLMO = {**LLAMA, "qk_norm": "heads", "norms": "post"}
GEMMA_3 = {
    "kind": "gemma3", "kv_heads": 4, "feed_forward": 24, "head_dim": 6, "window": 3, "rope_theta": 50.0,
    "local_rope_theta": 5.0, "query_pre_attn_scalar": 5, "global_attention_interval": 2,
}  # fmt: skip
MIXTURE = {
    "kind": "mixture", "moe_kernel": "xla", "experts": 4, "moe_ffn_hidden": 24, "kv_heads": 4, "aux_loss_coef": 0.1,
    "z_loss": 0.01, "router_bias_update_rate": 0.01, "router": "sigmoid", "shared_expert_ffn_hidden": 16,
}  # fmt: skip
DEEPSEEK = {
    **MIXTURE, "kind": "deepseek", "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "mtp_layers": 1,
}  # fmt: skip
del DEEPSEEK["kv_heads"]
PACKED = {"samples": {"reset_positions": True, "reset_attention": True, "eod": 0}}
SPLIT = {"data": 2, "model": 2, "mesh": {"sequence_parallel": True}}
ci = partial(pytest.param, marks=pytest.mark.ci)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": {"pipe": 2}},
        {**BLOOM, "unroll": "on"},
        {"kind": "bert", "layernorm": "post", **SPLIT},
        {**OLMO, **PACKED, "recompute": "selective"},
        {**GEMMA_3, "loss_chunks": 3},
        {**MIXTURE, "attention": "xla_blocks"},
        ci({"unroll": "on"}),
        ci({"recompute": "selective", **SPLIT}),
        ci({"compute": "fp16"}),
        ci({"data": 2, "mesh": {"zero": 3}}),
        ci(PACKED),
        ci({"kind": "bert"}),
        ci({"kind": "bert", "head": "span"}),
        ci({"kind": "bert", "head": "multiple_choice", "num_labels": 4}),
        ci({**LLAMA, "qk_norm": "head", "qkv_bias": True, "lora_rank": 2, "lora_dropout": 0.1}),
        ci({**MIXTURE, "data": 2, "mesh": {"expert": 2, "zero": 3}}),
        ci({**DEEPSEEK, **SPLIT}),
    ],
    ids=str,
)
def test_only_the_designed_operations_have_16_bits(changes, monkeypatch):
    for module in (bert, experts, gemma3, llama, mlp):  # it would stand between operations and their writers
        monkeypatch.setattr(module, "rematerialize", lambda function: function)
    config = small_config(**{"compute": "bf16", **changes})
    program, step = traced_step(config)
    assert not Counter(carried_in_16_bits(program, step))
    scores = {"_attend_block"} if config.model.attention == "xla" else set()  # `xla_blocks` computes in float32
    evaluation = program.eval_step.trace(program.abstract_state.model, program.abstract_batch)
    traced = [step, evaluation.jaxpr.jaxpr]
    if config.model.causal and config.mesh.pipe == 1:
        scores.add("attend_cached")
        traced.append(traced_generation(config))
    found = defaultdict(set)
    for jaxpr in traced:
        for name, functions in computed_in_16_bits(jaxpr).items():
            found[name] |= functions
    unknown = {name: functions - set(IN_16_BITS.get(name, "").split()) for name, functions in found.items()}
    assert not {name: functions for name, functions in unknown.items() if functions}
    assert scores <= found["wide matmul"]
