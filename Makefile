# make train        a small Llama on real text, from nothing to a sample of its writing (four minutes on two CPU cores)
# make gpt          a small GPT on the same text
# make bert         a small BERT on the same text, which learns to find masked words and the order of sentences
# make chat         after make train: that Llama learns to answer questions (five minutes on two CPU cores)
# make check        lint and every test that takes less than 0.1 s, for work in progress
# make test         every claim of the README, on simulated devices
# make test-ci      what .ci/run adds to it: comparisons with torch, transformers and megatron-core, more meshes, faults
# make reference    docs/reference, from the code; make docs: the site, in site/
# make test-all     everything: products of options, notebooks, planted mistakes, every Python, the CUDA compiler
# Each makes .venv and installs what it needs.

PYTHON ?= python3
# Another Python has an environment of its own: `make test PYTHON=python3.13` → .venv-python3.13.
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2

# NLTK's sentence rules, plain tables, from a package that carries them; nothing of it is executed.
PUNKT = data/punkt/llama_index/core/_static/nltk_cache

# A worker takes whole files, the longest first: what the tests of a file share is compiled once. Huge pages spare it a
# tenth of its time. A worker that dies ends the run: started again, the rest of its file would be waited for without end.
PYTEST = GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --max-worker-restart 0

.PHONY: train gpt bert chat lint check test test-ci test-megatron test-all test-compiler reference docs format clean

train: data/demo.idx
	$(VENV)/bin/python train.py --config llama_demo --optimizer.name muon --train.steps 180

gpt: data/demo.idx
	$(VENV)/bin/python train.py --config gpt_demo

data/demo.idx: | $(VENV)/installed
	$(VENV)/bin/python -m mjax prepare --demo --output data/demo

CHAT = $(VENV)/bin/python -m mjax generate --temperature 0.5 --seed 1 --tokens 50
chat: data/demo.idx
	test -d runs/llama_demo/checkpoints || $(MAKE) train
	test -f data/demo_chat.idx || $(VENV)/bin/python -m mjax prepare --demo --chat --tokenizer run:runs/llama_demo --chat-template plain --output data/demo_chat
	$(VENV)/bin/python -m mjax sft --init runs/llama_demo --data data/demo_chat --name chat --optimizer.name muon \
	    --optimizer.learning-rate 1e-3 --optimizer.min-learning-rate 1e-4 --train.global-batch 32 --train.steps 150
	@echo "before:" && $(CHAT) --run runs/llama_demo --prompt "What is Paris?"
	@echo "after:" && $(CHAT) --run runs/chat --chat --prompt "What is Paris?"

bert: $(VENV)/installed
	@test -d $(PUNKT) || $(PIP) --no-deps --no-compile --target data/punkt llama-index-core==0.14.25
	@test -f data/bert_demo.idx || NLTK_DATA=$(PUNKT) $(VENV)/bin/python -m mjax prepare --demo --output data/bert_demo \
	    --tokenizer bert-uncased --split-sentences --no-append-eod
	$(VENV)/bin/python train.py --config bert_demo

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python
	$(VENV)/bin/python scripts/check_names.py
	$(VENV)/bin/python scripts/check_words.py
	JAX_PLATFORMS=cpu $(VENV)/bin/python scripts/make_reference.py --check

check: lint
	$(PYTEST) --tier check

test: lint
	$(PYTEST)

test-ci: $(VENV)/installed-parity
	$(PYTEST) --tier ci --beyond test

# The newest megatron-core needs Python 3.12: make test-megatron PYTHON=python3.13
test-megatron: $(VENV)/installed-parity
	$(PYTEST) --tier ci tests/parity/test_megatron_*.py

test-all: lint $(VENV)/installed-parity test-compiler
	$(PYTEST) --tier all
	$(VENV)/bin/python tests/planted.py
	@for version in 3.11 3.12 3.13; do \
	    case "$$($(VENV)/bin/python --version)" in *" $$version."*) continue;; esac; \
	    for python in "$$(command -v python$$version)" "$$(pyenv root 2>/dev/null)"/versions/$$version.*/bin/python$$version; do \
	        if "$$python" -c "" 2>/dev/null; then $(MAKE) test PYTHON="$$python" VENV=.venv-python$$version || exit 1; break; fi; \
	    done; \
	done

# What compiles for NVIDIA GPUs without one, in an environment with JAX's CUDA wheels.
test-compiler: .venv-cuda/installed
	.venv-cuda/bin/python -m pytest -m compiler --tier all

.venv-cuda/installed: requirements-cuda.txt requirements-dev.txt $(VENV)/bin/python
	$(VENV)/bin/python -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-cuda.txt -r requirements-dev.txt
	@touch $@

reference: $(VENV)/installed
	JAX_PLATFORMS=cpu $(VENV)/bin/python scripts/make_reference.py

docs: .venv-docs/installed
	.venv-docs/bin/python scripts/make_site.py

.venv-docs/installed: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("mjax needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d; install one (on Ubuntu 22.04: apt install python3.11-venv) and run: make test PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: requirements.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/installed-parity: requirements-parity.txt $(VENV)/installed-dev
	$(PIP) -r requirements-parity.txt
	@touch $@

clean:
	rm -rf .venv* .cache .pytest_cache .ruff_cache build dist site *.egg-info
