# Each target does its own set-up on a fresh machine that has Python 3.11 to 3.14 and nothing else.
PYTHON ?= python3
BIN := .venv/bin
# XLA compiles the same small programs in every test run; they are kept here, outside the repository.
export JAX_COMPILATION_CACHE_DIR ?= $(HOME)/.cache/sable/xla

.PHONY: help venv browser train test test-all test-next test-orbax test-gpu lint docs dist clean

help:
	@echo "make train     train Sable on the built-in default task and draw its curve (a few minutes on two cores)"
	@echo "make test      lint, types and tests (CI)"
	@echo "make test-all  the same with every task, system and mode, and full counts"
	@echo "make test-next tests with the newest versions that resolve, on the newest Python here, in .venv-next"
	@echo "make test-gpu  the contracts' tests on a GPU (PY=python: by that interpreter, nothing installed)"
	@echo "make docs      build the site in docs/_build; every warning is an error"
	@echo "make dist      build wheel and sdist, check them, and train from the wheel in an empty environment"
	@echo "make venv      only the virtual environment, in .venv"
	@echo "make clean     remove .venv and caches"

venv: .venv/ready

# uv resolves and installs in seconds what takes pip a minute.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[jaxmarl,tune,ray,pettingzoo,video,onnx,docs,dev]'
	touch $@

# The report's page is tested in a real browser: Debian's, installed where there is none.
browser:
	@for name in $(CHROMIUM) chromium chromium-browser google-chrome; do \
		command -v "$$name" >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium fonts-liberation >/dev/null; \
	else \
		echo "no Chromium for the report's tests: install it, or name it with CHROMIUM=path" >&2; \
	fi

train: venv
	$(BIN)/sable train

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/lint_javascript.py

# Every page is read anew: the reference is made from the code, whose changes Sphinx does not see.
docs: venv
	$(BIN)/sphinx-build --quiet --fail-on-warning --nitpicky --fresh-env -b html docs docs/_build

# Tests mostly wait for XLA, which compiles on little more than one core; a file's tests share what it compiled.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: lint docs browser
	$(PYTEST) -m "not slow" --durations=40

test-all: lint docs browser .venv/envpool test-orbax
	$(PYTEST)

# 800 MB for three tests, so apart; the newest that there is, since the newest have most of our suites.
.venv/envpool: .venv/ready
	@if $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[envpool]'; then touch $@; \
	else echo "EnvPool cannot be installed here: its tests will be skipped" >&2; fi

# Nothing is pinned, and what there is newer is taken each time. NEXT=python names another Python. The extra
# jaxmarl is left out: its gymnax keeps jax below 0.12. Kernels are lowered for CUDA first, each and alone, since
# that is what a new JAX breaks most.
NEXT_EXTRAS := tune,ray,pettingzoo,video,onnx,dev
test-next: export SABLE_TEST_WITHOUT = jaxmarl
test-next: venv browser
	@python=$${NEXT:-$$(UV=$(BIN)/uv .ci/newest-python)} && \
		$(BIN)/uv venv --quiet --allow-existing --python "$$python" .venv-next
	$(BIN)/uv pip install --quiet --upgrade --python .venv-next/bin/python -e '.[$(NEXT_EXTRAS)]'
	@.venv-next/bin/python -VV && echo "without the extra jaxmarl: its gymnax keeps jax below 0.12"
	@$(BIN)/uv pip list --quiet --python .venv-next/bin/python | grep -E '^(jax|jaxlib|flax|optax|numpy|ray) '
	.venv-next/bin/python -m pytest -k built_for_a_gpu tests/kernels tests/systems/test_decoding.py
	.venv-next/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" --durations=20

# What an older version wrote, by an Orbax as new as the one that wrote it: jax2onnx keeps it out of .venv.
test-orbax: .venv/orbax/ready
	.venv/orbax/bin/python -m pytest tests/test_older_files.py

.venv/orbax/ready: .venv/ready
	$(PYTHON) -m venv .venv/orbax
	grep -vE '^(orbax-checkpoint|jax2onnx)==' constraints.txt >.venv/orbax/constraints.txt
	$(BIN)/uv pip install --quiet --python .venv/orbax/bin/python -c .venv/orbax/constraints.txt \
		-e '.[tune,orbax]' 'orbax-checkpoint>=0.12' pytest hypothesis beartype
	touch $@

# The contracts where kernels are compiled rather than interpreted. JAX must see the GPU or nothing runs. Each
# process takes what memory it needs; the tests of one mode share what one process compiled, without trying out
# which matrix product is fastest. Files without such tests are not even imported: they may want packages that
# are not there.
test-gpu: PYTHON_THERE = $(or $(PY),$(BIN)/python)
test-gpu: JOBS ?= 12
test-gpu: export JAX_PLATFORMS = cuda
test-gpu: export XLA_FLAGS = --xla_gpu_autotune_level=0
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
test-gpu: $(if $(PY),,venv)
	@$(PYTHON_THERE) -c "import jax; jax.devices()" 2>/dev/null || \
		{ echo "$(PYTHON_THERE) has no jax, or one that sees no NVIDIA GPU" >&2; exit 1; }
	$(PYTHON_THERE) -m pytest -vv -m gpu -n $(JOBS) --dist loadgroup --durations=20 \
		$$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

# The wheel is built from the sdist, so that both are whole. Nothing is pinned where it is tried.
dist: venv
	rm -rf dist build src/*.egg-info
	$(BIN)/uv build --quiet
	$(BIN)/uv tool run --quiet twine check --strict dist/*.whl dist/*.tar.gz
	UV=$(BIN)/uv .ci/try-wheel dist/*.whl $(BIN)/python

clean:
	rm -rf .venv .venv-next build dist docs/_build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
