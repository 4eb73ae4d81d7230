# make train        a small GPT on real text, from nothing to a sample of its writing (about five minutes on two CPU cores)
# make llama        a small Llama on the same text, which learns faster than the GPT
# make bert         a small BERT on the same text, which learns to find masked words and the order of sentences
# make check        lint and the tests that compile nothing: about a minute, for work in progress
# make test         lint and the suite but for what takes long, on simulated devices
# make test-parity  what compares with torch, transformers and megatron-core, and what takes long
# make test-products  all other combinations of options
# Each makes .venv and installs what it needs.

PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2

# NLTK's sentence rules, plain tables, from a package that carries them; nothing of it is executed.
PUNKT = data/punkt/llama_index/core/_static/nltk_cache

# A worker takes whole files, in the order of tests/conftest.py: what the tests of a file share is compiled once. Huge
# pages spare it a tenth of its time.
PYTEST = GLIBC_TUNABLES=glibc.malloc.hugetlb=1 .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What compiles nothing: data, flags and configs, schedules, files of others, scores, what a plan is searched with.
CHECK = data test_bad_inputs.py test_batch_size.py test_config.py test_flags.py test_hardware.py test_packages.py \
    test_progress.py test_resolve.py parallel/test_schedules.py training/test_agreement.py training/test_health.py \
    training/test_metrics.py finetuning/test_batches.py interop/test_fast_tokenizer.py interop/test_megatron_files.py \
    interop/test_refusals.py test_products.py tasks/test_labelled_refusals.py tasks/test_sentence_tasks.py tasks/test_squad.py \
    tasks/test_squad_scores.py tasks/test_tasks.py tasks/test_windows.py planner/test_calibration.py \
    planner/test_config_file.py planner/test_fit.py planner/test_hlo.py planner/test_search.py \
    planner/test_search_report.py profiling/test_gpu_trace.py training/test_environment.py

.PHONY: train llama bert lint check test test-parity test-products format clean

train: data/demo.idx
	.venv/bin/python train.py --config gpt_demo

llama: data/demo.idx
	.venv/bin/python train.py --config llama_demo

data/demo.idx: | .venv/installed
	.venv/bin/python -m mjax prepare --demo --output data/demo

bert: .venv/installed
	@test -d $(PUNKT) || $(PIP) --no-deps --no-compile --target data/punkt llama-index-core==0.14.25
	@test -f data/bert_demo.idx || NLTK_DATA=$(PUNKT) .venv/bin/python -m mjax prepare --demo --output data/bert_demo \
	    --tokenizer bert-uncased --split-sentences --no-append-eod
	.venv/bin/python train.py --config bert_demo

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

check: lint
	$(PYTEST) $(addprefix tests/,$(CHECK))

test: lint
	$(PYTEST)

test-parity: .venv/installed-parity
	$(PYTEST) --parity --long -m "(parity or long) and not product"

test-products: .venv/installed-parity
	$(PYTEST) --parity --product -m product

format: .venv/installed-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: requirements.txt pyproject.toml | .venv/bin/python
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	@touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	$(PIP) -r requirements-dev.txt
	@touch $@

.venv/installed-parity: requirements-parity.txt .venv/installed-dev
	$(PIP) -r requirements-parity.txt
	@touch $@

clean:
	rm -rf .venv .jax_cache .pytest_cache .ruff_cache build *.egg-info
