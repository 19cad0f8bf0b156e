# make lab     set up on first use, and open JupyterLab on the lessons
# make test    the same, and run the checks (12 minutes at most on two cores)
# make help    the rest

VENV ?= .venv
BIN := $(VENV)/bin
export TINYVLLM_VENV := $(VENV)
.DEFAULT_GOAL := help
.PHONY: help setup lab solutions lessons test test-slow lint bench grade clean

help:
	@echo "make lab        open JupyterLab on lessons/ (sets everything up the first time)"
	@echo "make test       run the checks"
	@echo "make test-slow  run the long ones"
	@echo "make solutions  execute solutions/*.py into their notebooks (ONLY='06 07' for some)"
	@echo "make lessons    make lessons/ from solutions/*.py (ONLY='06 07' for some)"
	@echo "make setup      only set up"
	@echo "make bench      run the benchmarks that need no GPU"
	@echo "make grade SUBMISSIONS=DIR  grade a folder of submissions into report/"
	@echo "make clean      remove the virtual environment"

$(VENV)/.installed-course: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) course

$(VENV)/.installed-grade: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) grade

$(VENV)/.installed-dev: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) dev

setup: $(VENV)/.installed-course

# The notebook is open, and nothing asks a newcomer about news or new versions of JupyterLab.
LAB := --notebook-dir=. --LabApp.default_url=/lab/tree/lessons/00_welcome.ipynb
LAB += --LabApp.app_settings_dir=tools/jupyterlab

lab: setup
	$(BIN)/jupyter lab $(LAB) $(LAB_OPTIONS)

solutions: $(VENV)/.installed-dev
	$(BIN)/tinyvllm run-solutions $(ONLY)

lessons: $(VENV)/.installed-dev
	$(BIN)/tinyvllm build-lessons $(ONLY)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow and not gpu"

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/emulation.py

grade: $(VENV)/.installed-grade
	@test -n "$(SUBMISSIONS)" || { echo "make grade SUBMISSIONS=DIR: name the folder of submissions" >&2; exit 2; }
	$(BIN)/tinyvllm grade "$(SUBMISSIONS)" --report report $(GRADE_OPTIONS)

clean:
	rm -rf $(VENV)
