# Each target makes what it needs: `make demo` and `make test` work on a fresh clone with nothing but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-deploy quick soak lint types pytest pytest-lightning other-package dist format docs bench digest clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(ARGS)

test: lint types pytest other-package

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# types, and the direction of imports, on the package as it installs, where models/ and datamodules/ are lightning_fed.models and lightning_fed.datamodules
types: $(VENV)/.dev
	rm -rf build/types build/lib build/bdist.*
	$(BIN)/pip install --quiet --no-deps --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p lightning_fed
	$(BIN)/deptry lightning_fed models datamodules configs
	cd build/types && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

pytest: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal --doctest-modules --pyargs lightning_fed tests $(ARGS)

# the suite with `lightning` in the place of `pytorch_lightning`
pytest-lightning: export LIGHTNING_FED_PACKAGE := lightning
pytest-lightning: pytest

# of the suite, what touches Lightning most, with `lightning` in the place of `pytorch_lightning`
OTHER := equivalence/test_fit integration/test_bad_trainer integration/test_checkpoints integration/test_lightning \
	integration/test_lightning_door integration/test_loggers integration/test_packages integration/test_predict \
	integration/test_progress integration/test_results_as_data integration/test_resume integration/test_reuse_hooks \
	integration/test_wandb integration/test_wandb_continues
other-package: $(VENV)/.dev
	LIGHTNING_FED_PACKAGE=lightning $(BIN)/pytest -q -n 2 --dist worksteal $(OTHER:%=tests/%.py)

# federations on loopback with Flower: equality with the simulation, kills, outsiders; without nginx what tests it is skipped; takes 10 to 20 minutes
test-deploy: $(VENV)/.dev
	LIGHTNING_FED_DEPLOY=1 $(BIN)/pytest tests/unit/deploy tests/equivalence/test_remote.py tests/deploy $(ARGS)

# unit, property and equivalence tests, without the rows and columns of the matrix engine x module that are marked slow
quick: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" tests/unit tests/property tests/equivalence $(ARGS)

# the long variants of the tests of the store: kills at hundreds of points and at random, thousands of damaged files, 10,000 rounds,
# FEMNIST at its real size (45 GB of disk), 100,000 clients; takes an hour or two
soak: $(VENV)/.dev
	LIGHTNING_FED_SOAK=1 $(BIN)/pytest -n 2 --dist worksteal tests/unit/store tests/property/test_disk_store.py tests/integration/test_kills.py tests/integration/test_soak.py $(ARGS)

# the documentation site, in build/site: every warning is an error, every link to a page, anchor or image must lead somewhere
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/site $(ARGS)
	$(BIN)/python docs/check_links.py build/site

# a pure wheel and an sdist, in dist/
dist: $(VENV)/.dev
	rm -rf dist build
	$(BIN)/python -m build

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make digest ARGS="--compare before.json": whether every number is what it was
digest: $(VENV)/.dev
	$(BIN)/python tests/digest.py digest.json $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/run.py $(ARGS)

$(VENV)/.installed: setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis docs/api docs/gallery benchmarks/.venvs benchmarks/.cache
