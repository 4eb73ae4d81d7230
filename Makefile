# make train        a small GPT on real text, from nothing to a sample of its writing (about five minutes on two CPU cores)
# make bert         a small BERT on the same text, which learns to find masked words and the order of sentences
# make test         lint and the whole suite, on simulated devices
# make test-parity  what compares with torch, transformers and megatron-core, and what takes long
# Each makes .venv and installs what it needs.

PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2

# NLTK's sentence rules, plain tables, from a package that carries them; nothing of it is executed.
PUNKT = data/punkt/llama_index/core/_static/nltk_cache

.PHONY: train bert test test-parity format clean

train: .venv/installed
	@test -f data/demo.idx || .venv/bin/python -m mjax prepare --demo --output data/demo
	.venv/bin/python train.py --config gpt_demo

bert: .venv/installed
	@test -d $(PUNKT) || $(PIP) --no-deps --no-compile --target data/punkt llama-index-core==0.14.25
	@test -f data/bert_demo.idx || NLTK_DATA=$(PUNKT) .venv/bin/python -m mjax prepare --demo --output data/bert_demo \
	    --tokenizer bert-uncased --split-sentences --no-append-eod
	.venv/bin/python train.py --config bert_demo

test: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -n $(WORKERS)

test-parity: .venv/installed-parity
	.venv/bin/python -m pytest -n $(WORKERS) --parity --long -m "parity or long"

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
