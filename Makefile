# Needs Python 3.10 or newer, make and a C library. Each target makes the environment it needs and keeps it until
# pyproject.toml or constraints.txt changes. Without a GPU, a smaller torch comes from its own index:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

.DEFAULT_GOAL := help
.PHONY: help demo test faults parity bench hosts notebooks lint clean
.DELETE_ON_ERROR:

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
	command -v $$p >/dev/null && $$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PARITY := .venv-parity
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo "make demo       run the notebooks offline on the embedded voice; sound and report land in runs/demo/"
	@echo "make test       lint, unit tests, every notebook"
	@echo "make faults     broken inputs, kills, full disks, rotten bits and worse; one line a kind"
	@echo "make parity     compare live with the f5-tts package"
	@echo "make bench      speaking, serving, training and faults beside upstream's; writes benchmarks/results/"
	@echo "make hosts      the notebooks in copies of Colab's and Kaggle's versions, and from a wheel"
	@echo "make notebooks  write notebooks/*.ipynb from notebooks/source/"
	@echo "make lint       ruff on code and notebooks"
	@echo "make clean      remove the environments and caches; data and runs stay"

demo: $(STAMP)
	$(PY) notebooks/run.py --demo

# Two files of tests at a time; threads that wait for work sleep meanwhile, or they would keep the others from it.
TWO_FILES := OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadfile

test: lint
	$(TWO_FILES) tests --ignore=tests/faults --durations=5

faults: $(STAMP)
	$(TWO_FILES) tests/faults -q

parity: $(PARITY)/.installed
	$(PARITY)/bin/python tests/parity/compare_text.py
	$(PARITY)/bin/python tests/parity/compare.py
	$(PARITY)/bin/python tests/parity/compare_checkpoints.py

bench: $(PARITY)/.installed $(STAMP)
	$(PARITY)/bin/python benchmarks/speak.py
	$(PY) benchmarks/speak_words.py
	$(PARITY)/bin/python benchmarks/serve.py
	$(PARITY)/bin/python benchmarks/train_step.py
	$(PARITY)/bin/python benchmarks/upstream_faults.py
	$(PY) benchmarks/memory_table.py
	$(PY) benchmarks/adam8bit.py

hosts: $(STAMP)
	$(PY) -m pytest -m hosts tests/test_hosts.py tests/test_wheel.py

notebooks: $(STAMP)
	$(PY) notebooks/build.py

lint: $(STAMP)
	$(PY) -m ruff check .

clean:
	rm -rf $(VENV) $(PARITY) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone, at the proved version: nothing after it can bring another one.
define environment
	@test -n "$(PYTHON)" || { echo "f5kit needs Python 3.10 or newer; name one: make PYTHON=/path/to/python3"; exit 1; }
	@echo "== $(1) [1/3] $$($(PYTHON) --version)"
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@echo "== $(1) [2/3] $(TORCH) (0.2 GB for CPU, about 3 GB with CUDA)"
	$(1)/bin/python -m pip install -q -c constraints.txt $(TORCH)
	@echo "== $(1) [3/3] f5kit and the libraries it stands on (some minutes)"
endef

$(STAMP): pyproject.toml constraints.txt
	$(call environment,$(VENV))
	$(PY) -m pip install -q -c constraints.txt -e ".[notebooks,log,pinyin,numbers,data,judge,serve,dev]"
	$(PY) -m pip install -q --no-deps $(shell grep '^resemblyzer==' constraints.txt)
	@touch $@

# f5-tts and bigvgan without their dependencies (gradio, torchcodec, pesq and their trees): the models need few of them.
$(PARITY)/.installed: pyproject.toml constraints.txt tests/parity/requirements.txt
	$(call environment,$(PARITY))
	$(PARITY)/bin/python -m pip install -q -c constraints.txt -e ".[data,serve]" -r tests/parity/requirements.txt
	$(PARITY)/bin/python -m pip install -q --no-deps f5-tts==1.1.22 bigvgan==2.4.1
	@touch $@
