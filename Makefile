# make lab     set up on first use, and open JupyterLab on the lessons
# make test    the same, and run the checks (12 minutes at most on two cores)
# make help    the rest

VENV ?= .venv
BIN := $(VENV)/bin
export TINYVLLM_VENV := $(VENV)
.DEFAULT_GOAL := help
.PHONY: help setup lab notebook progress doctor solutions lessons test test-slow lint bench grade clean

help:
	@echo "make lab        open JupyterLab on lessons/ (sets everything up the first time); its options in LAB_OPTIONS,"
	@echo "                such as make lab LAB_OPTIONS='--no-browser --port=8765'; Ctrl-C, then y, ends it"
	@echo "make notebook   the same in Jupyter Notebook 7"
	@echo "make progress   draw the map of the course: what has passed, and where to go on"
	@echo "make doctor     say what was found on this machine, and what to do about what is missing"
	@echo "make test       run the checks"
	@echo "make test-slow  run the long ones"
	@echo "make solutions  execute solutions/*.py into their notebooks (ONLY='06 07' for some)"
	@echo "make lessons    make lessons/ from solutions/*.py (ONLY='06 07' for some)"
	@echo "make setup      only set up"
	@echo "make bench      run the benchmarks that need no GPU"
	@echo "make grade SUBMISSIONS=DIR  grade a folder of submissions into report/; its options in GRADE_OPTIONS"
	@echo "make clean      remove the virtual environment"

$(VENV)/.installed-course: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) course

$(VENV)/.installed-notebook: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) notebook

$(VENV)/.installed-grade: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) grade

$(VENV)/.installed-dev: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV) dev

setup: $(VENV)/.installed-course

# The notebook is open, and nothing asks a newcomer about news or new versions of JupyterLab. What warns without need is
# settled in tools/jupyterlab. `tinyvllm` and this Python come first in JupyterLab's terminals and behind a cell's `!`.
LAB = --notebook-dir=. --LabApp.default_url=$(PAGES)/lessons/00_welcome.ipynb
LAB += --LabApp.app_settings_dir=tools/jupyterlab
PAGES = /lab/tree
notebook: PAGES = /notebooks
LAB_PATHS = PATH="$$(cd $(BIN) && pwd):$$PATH" \
	JUPYTER_CONFIG_PATH="$$(pwd)/tools/jupyterlab$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}"

lab: setup
notebook: $(VENV)/.installed-notebook
lab notebook:
	@$(BIN)/python tools/jupyterlab/sign.py lessons solutions >/dev/null 2>&1 || true
	@$(LAB_PATHS) $(BIN)/jupyter lab $(LAB) $(LAB_OPTIONS)

progress doctor: setup
	@$(BIN)/tinyvllm $@

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
