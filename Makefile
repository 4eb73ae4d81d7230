# make train        a small GPT on real text, from nothing to a sample of its writing (about five minutes on two CPU cores)
# make llama        a small Llama on the same text, which learns faster than the GPT
# make bert         a small BERT on the same text, which learns to find masked words and the order of sentences
# make check        lint and every test that takes less than 0.1 s, for work in progress
# make test         every claim of the README, on simulated devices
# make test-ci      what .ci/run adds to it: comparisons with torch, transformers and megatron-core, more meshes, faults
# make test-all     everything: products of options, notebooks, planted mistakes, every Python, the CUDA compiler
# Each makes .venv and installs what it needs.

PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2

# NLTK's sentence rules, plain tables, from a package that carries them; nothing of it is executed.
PUNKT = data/punkt/llama_index/core/_static/nltk_cache

# A worker takes whole files, the longest first: what the tests of a file share is compiled once. Huge
# pages spare it a tenth of its time.
PYTEST = GLIBC_TUNABLES=glibc.malloc.hugetlb=1 .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: train llama bert lint check test test-ci test-all format clean

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
	$(PYTEST) --tier check

test: lint
	$(PYTEST)

test-ci: .venv/installed-parity
	$(PYTEST) --tier ci --beyond test

test-all: lint .venv/installed-parity
	$(PYTEST) --tier all

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
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info
