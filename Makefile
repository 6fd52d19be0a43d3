# `make demo` and `make test` do their own set-up; `make gpu` is the one command for a machine
# with a GPU, torch and no network. CONTRIBUTING.md tells more.
.PHONY: demo test test-transformers test-cudnn matrix docs notebooks lint format build wheel \
	wheel-aarch64 sdist setup gpu sanitize clean

SYSTEM_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
# pip's own copies of cmake and ninja first
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

demo: build
	$(PYTHON) -m examples.train_llama
	$(PYTHON) -m examples.serve

test: build
	$(PYTHON) -m pytest -m "not gpu" -n auto --maxprocesses 8 --maxschedchunk 1

# The adapter's tests with the newest transformers that it supports; the venv has the oldest.
NEWEST := 5.23.0
test-transformers: build
	$(PYTHON) -m pip install --quiet --no-deps --target build/transformers-$(NEWEST) transformers==$(NEWEST)
	PYTHONPATH=build/transformers-$(NEWEST) $(PYTHON) -m pytest -m "not gpu" -n auto --maxprocesses 8 \
		tests/test_transformers*.py tests/test_rotary.py tests/test_nn.py

# What depends on cuDNN, with the newest in place of torch's; nothing is built.
NEWEST_CUDNN := 9.28.1.4
test-cudnn: build
	$(PYTHON) -m tests.versions --cudnn $(NEWEST_CUDNN)

# The table of docs/install.md: an environment and a build for each torch. Takes half an hour for
# each, and 8 GB while it runs.
matrix: $(VENV)/ready
	$(PYTHON) -m tests.versions --torch 2.11.0 2.15.0 --cudnn own $(NEWEST_CUDNN) --remove

# Warnings are errors; `make test` builds it too.
docs: build
	$(PYTHON) -m sphinx -W --keep-going -q -b html docs build/docs

# Draws the figures of docs/notebooks again.
notebooks: build
	$(PYTHON) -m benchmarks.notebooks

CXX_FILES := 'csrc/*.c' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'csrc/*.h' 'examples/*.cpp'
lint: $(VENV)/ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m benchmarks.tables --check
	clang-format --dry-run --Werror $$(git ls-files $(CXX_FILES))

format: $(VENV)/ready
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	clang-format -i $$(git ls-files $(CXX_FILES))

# Ninja knows what is stale, so this runs every time.
build: $(VENV)/ready
	$(PYTHON) setup.py --quiet build_ext --inplace

# For every Python and the torch of this environment, which keeps its libraries to itself.
TORCH_LIBRARIES := libc10.so libc10_cuda.so libtorch.so libtorch_cpu.so libtorch_cuda.so \
	libtorch_python.so
# Its plans of common shapes are for these GPUs; those for one take minutes.
wheel: export CUDNN_OPS_PLANS ?= h200 b200 a100
wheel: $(VENV)/ready
	rm -rf build/wheel
	$(PYTHON) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m auditwheel repair --plat manylinux_2_28_$$(uname -m) --only-plat \
		$(TORCH_LIBRARIES:%=--exclude %) --wheel-dir dist build/wheel/*.whl

# The same for aarch64, by Debian's g++-aarch64-linux-gnu and the torch of that processor; what runs
# on the GPU is machine code of the GPU's in both.
CROSS := $(CURDIR)/build/aarch64
wheel-aarch64: export CMAKE_TOOLCHAIN_FILE := $(CURDIR)/csrc/cmake/aarch64.cmake
wheel-aarch64: export CMAKE_ARGS := -DCUDNN_OPS_SITE_PACKAGES=$(CROSS)/site -DCUDNN_OPS_OUTPUT_DIR=$(CROSS)/package
wheel-aarch64: export CUDNN_OPS_BUILD_DIR := $(CROSS)/cmake
wheel-aarch64: $(VENV)/ready
	test -d $(CROSS)/site || $(PYTHON) -m pip install --quiet --no-deps --no-compile \
		--target $(CROSS)/site --platform manylinux_2_28_aarch64 --only-binary=:all: \
		torch==$$($(PYTHON) -c 'from importlib.metadata import version; print(version("torch"))')
	rm -rf $(CROSS)/wheel
	$(PYTHON) setup.py --quiet build --build-base $(CROSS)/wheel \
		bdist_wheel --plat-name manylinux_2_28_aarch64 --dist-dir $(CROSS)/wheel
	$(PYTHON) -m tests.wheels $(CROSS)/wheel/*.whl
	mkdir -p dist && mv $(CROSS)/wheel/*.whl dist

sdist: $(VENV)/ready
	$(PYTHON) -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'

setup: $(VENV)/ready

# The pins are in pyproject.toml. The frontend comes without what its Python side would pull in.
$(VENV)/ready: pyproject.toml
	$(SYSTEM_PYTHON) -m venv $(VENV)
	$(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*sum(extras.values(), []), sep="\n")' > $(VENV)/requirements.txt
	$(PYTHON) -m pip install --quiet -r $(VENV)/requirements.txt
	$(PYTHON) -m pip install --quiet --no-deps nvidia-cudnn-frontend==1.32.0
	touch $@

# Builds, tests and benchmarks with the Python that has torch. WHEELS names a folder with the
# wheels that this Python lacks (the frontend's, usually); OUT is where the results go.
WHEELS ?=
OUT ?=
SITE := build/site
gpu: export PYTHONPATH := $(CURDIR)/$(SITE):$(PYTHONPATH)
gpu:
	@test -z "$(WHEELS)" || $(SYSTEM_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(SITE) $(WHEELS)/*.whl
	$(SYSTEM_PYTHON) setup.py --quiet build_ext --inplace
	$(SYSTEM_PYTHON) -m benchmarks.gpu_suite $(if $(OUT),--out $(OUT))

# Bounds as they were asked for, and races in shared memory: kernels of our own, and cuDNN's where
# they decode over pages, for bounds alone. Takes a few minutes, after `make gpu` or `make build`.
SANITIZER ?= compute-sanitizer --error-exitcode 1 --report-api-errors no --target-processes application-only
OURS := regex=^(adaptive_norm|batch_norm|conv_epilogue|depthwise_conv|depthwise_conv1d|fp8|gated|group_norm|max_pool|moe|norm|rms_norm|layer_norm|paged|rotary)_
sanitize: export PYTHONPATH := $(CURDIR)/$(SITE):$(PYTHONPATH)
sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck $(SYSTEM_PYTHON) -m tests.sanitizer_sample
	$(SANITIZER) --tool racecheck --kernel-name '$(OURS)' $(SYSTEM_PYTHON) -m tests.sanitizer_sample

clean:
	rm -rf build dist *.egg-info cudnn_ops/*.so cudnn_ops/stub demo_output
