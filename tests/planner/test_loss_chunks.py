"""The loss in chunks, compiled for a GPU: what it saves, what it costs, and what a plan says of both.

What compiles needs the CUDA wheels, as in test_compile.py. Products are cuBLAS's, as on a GPU that has timed them.
"""

import re
from dataclasses import replace

import pytest

from mjax.config import load_config
from mjax.hardware import GIB, gpu_named
from mjax.planner.compile import compile_step
from mjax.planner.fit import changes_that_fit
from mjax.planner.loss_chunks import CHUNKS, with_loss_chunks
from mjax.planner.memory import predict_memory
from mjax.planner.memory_section import memory_section
from mjax.planner.roofline import PRODUCTS, roofline
from mjax.planner.time import predict_time
from tests.compiler import needs_compiler

H100 = gpu_named("h100")
# Layers, few enough that the logits are the peak; micro-batch; recomputation.
CASES = {"llama32_1b": (8, 2, "selective"), "gpt_1b": (12, 16, "none")}


def config_of(name, chunks):
    config = load_config(name)
    layers, micro_batch, recompute = CASES[name]
    return replace(
        config,
        model=replace(config.model.without_dropout(), layers=layers),
        mesh=replace(config.mesh, data=1, zero=0),
        data=replace(config.data, mock=True),
        train=replace(
            config.train,
            global_batch=micro_batch,
            micro_batch=micro_batch,
            recompute=recompute,
            unroll="on",
            loss_chunks=chunks,
        ),
    )


@pytest.fixture(scope="module")
def compiled():
    """A step of a config and its roofline, compiled once."""
    done = {}

    def step(name, chunks):
        if (name, chunks) not in done:
            found = compile_step(config_of(name, chunks), "h100", options={"xla_gpu_enable_triton_gemm": False})
            done[name, chunks] = found, roofline(found.text, H100, 1)
        return done[name, chunks]

    return step


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_no_array_has_the_logits_of_all_tokens(compiled, name):
    model, train = config_of(name, 1).model, config_of(name, 1).train
    tokens, rows = train.micro_batch * model.sequence, model.padded_vocabulary

    def shapes(chunks):
        return set(re.findall(r"\w+\[[\d,]+\]", compiled(name, chunks)[0].text))

    assert f"bf16[{tokens},{rows}]" in shapes(1)
    assert {shape for shape in shapes(8) if re.search(rf"\[(?:\d+,)?{tokens},{rows}\]", shape)} == set()
    assert f"bf16[{tokens},{rows // 8}]" in shapes(8)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_step_has_one_more_product_of_the_output_layer_and_no_other(compiled, name):
    config = config_of(name, 1)
    logits = 2 * config.train.micro_batch * config.model.sequence * config.model.hidden * config.model.padded_vocabulary
    flops = [compiled(name, chunks)[1].rows[PRODUCTS].flops for chunks in (1, 8)]
    assert flops[1] - flops[0] == pytest.approx(logits)


@needs_compiler
@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_plan_has_the_memory_and_the_time_of_the_compiled_step(compiled, name, chunks):
    found, table = compiled(name, chunks)
    config = config_of(name, chunks)
    assert predict_memory(config).total == pytest.approx(found.memory.total, rel=0.05)
    assert predict_time(config, H100).total == pytest.approx(table.seconds, rel=0.05)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_memory_is_lower_by_at_least_what_a_plan_says(compiled, name):
    whole, chunked = (compiled(name, chunks)[0].memory.total for chunks in (1, 8))
    predicted = [predict_memory(config_of(name, chunks)).total for chunks in (1, 8)]
    assert predicted[0] - predicted[1] > 0.5 * GIB
    assert whole - chunked > predicted[0] - predicted[1] - 0.05 * whole


# --- Proposals --------------------------------------------------------------------------------------------------------


def test_a_plan_says_in_how_many_chunks_the_loss_is_computed():
    section = memory_section(config_of("llama32_1b", 8), H100)
    assert section.values["loss_chunks"] == 8
    assert "in 8 chunks of the vocabulary, 16,032 logits of a token at a time, computed twice" in section.text
    assert "chunks" not in memory_section(config_of("llama32_1b", 1), H100).text


def test_chunks_are_proposed_where_the_logits_are_the_peak_and_they_make_it_fit():
    config = config_of("llama32_1b", 1)
    memory = predict_memory(config)
    assert memory.moment == "head"
    (chunked,) = with_loss_chunks(config, memory)
    smaller = predict_memory(chunked).total
    assert smaller < memory.total
    changes = changes_that_fit(config, smaller / 0.94)
    assert f"--train.loss-chunks {CHUNKS}" in {change.flags for change in changes}
    assert with_loss_chunks(chunked, replace(memory)) == []
    assert with_loss_chunks(config, replace(memory, moment="backward")) == []
    assert "loss-chunks" not in str(changes_that_fit(config_of("gpt_1b", 8), 4 * GIB))
