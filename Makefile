# Two commands need nothing but Python >= 3.11: `make lab` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIN := -c binder/constraints.txt
# JupyterLab refuses to run as root unless told; in a container there often is nobody else.
LAB_FLAGS := $(if $(filter 0,$(shell id -u 2>/dev/null)),--allow-root)
# Two workers of one thread each; a browser journey has the machine to itself.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
SOURCES := comera_lab tests notebooks/source

.PHONY: lab test quick check bench notebooks notebooks-timing clean

lab: .venv/lab
	@$(BIN)/comera-lab data prepare
	$(BIN)/comera-lab lab $(LAB_FLAGS)

test: .venv/test check
	@$(BIN)/comera-lab data prepare
	$(PYTEST) -m "not browser or notebooks"
	$(BIN)/python -m pytest -m "browser and not notebooks"

# Everything that needs no browser, no executed lesson and no long training: under three minutes.
quick: .venv/test
	$(PYTEST) -m "not slow and not browser and not notebooks"

check: .venv/test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/comera-lab notebooks check

bench: .venv/lab
	$(BIN)/comera-lab bench --suite cpu

notebooks: .venv/test
	$(BIN)/comera-lab notebooks build

# Every lesson once, on one core: some minutes. Writes data/results/lessons_cpu.jsonl and notebooks/TIMES.md.
notebooks-timing: .venv/test
	$(BIN)/comera-lab notebooks timing

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/lab: .venv/bin/python pyproject.toml binder/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIN) -e ".[lab]"
	$(BIN)/python -m ipykernel install --sys-prefix --name python3
	@touch $@

.venv/test: .venv/lab
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIN) -e ".[test]"
	@touch $@

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
