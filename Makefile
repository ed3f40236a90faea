# zero_c: build, run and check. Needs Python 3.10 or newer, gcc and make; the rest is installed in .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(VENV)/bin/pytest -q
# Python files are used where they lie; these ask for a new build.
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.[ch] csrc/cuda/*)

.PHONY: help venv demo test long long-waiting long-others asan tsan fuzz model analyze cuda emulate bench lint clean

help:
	@echo "make venv    environment in $(VENV): pinned requirements, zero_c built in this folder"
	@echo "make demo    train a small language model on two ranks, at stages 0 to 3 and with DDP (about two minutes)"
	@echo "make test    the tests but those of minutes (what CI runs); some skip where CUDA 13, spin or nccl.h is missing"
	@echo "             ($(VENV)/bin/pytest -rs tests says which); installs transformers, accelerate and lightning too (about 200 MB)"
	@echo "make long    the tests that take minutes each, but for those that make emulate, asan and tsan run"
	@echo "make asan    C tests, and the core of the Python suite, with address and undefined behaviour checks"
	@echo "make tsan    C tests, on CPUs and on emulated GPUs, with the thread sanitizer"
	@echo "make fuzz    every parser of foreign input reads made-up ones, SECONDS=300 each (tests/fuzz/README.md)"
	@echo "make model   the shared-memory protocol, checked by spin (apt-get install spin; 4 GiB, minutes)"
	@echo "make analyze gcc -fanalyzer and clang-tidy over the C sources; a tool that is missing is left out"
	@echo "make cuda    the CUDA part compiled by nvcc for sm_80 and sm_90, without spills, with wide accesses;"
	@echo "             what it declares of NCCL, against nccl.h where that is installed (about 200 MB, not a requirement:"
	@echo "             $(VENV)/bin/pip install --no-deps 'nvidia-nccl-cu13>=2.28', or NCCL_HOME)"
	@echo "make emulate every test of the CUDA part on an emulated CUDA and NCCL, without a GPU; needs CUDA 13's headers"
	@echo "make bench   time and memory against other packages"
	@echo "make lint    layers of the C sources, exports, stubs"
	@echo "make clean   remove what was built ($(VENV) stays)"
	@echo "PYTHON=... chooses the interpreter for the environment (default python3)"

venv: $(VENV)/.built

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q -r requirements.txt
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(RUN) -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

# Other packages, for the examples that use them; torch keeps its pin.
$(VENV)/.examples: $(VENV)/.installed requirements-examples.txt
	$(RUN) -m pip install -q -r requirements.txt -r requirements-examples.txt
	@touch $@

demo: venv
	$(RUN) examples/demo.py

# Two files at a time: many tests wait, and tests of a file share their ranks.
test: venv $(VENV)/.examples
	$(PYTEST) -n 2 --dist loadfile tests

# These mostly wait, for time to pass or for a single process, so the others run beside them.
WAITING := $(addprefix tests/,test_soak.py test_restart.py test_fuzz.py test_gpu_check.py test_jobs.py test_examples_hf.py)
# What `make emulate`, `make asan` and `make tsan` run whole is left to them.
ELSEWHERE := $(addprefix tests/,test_c.py test_cuda.py test_gpu_arrays.py test_sanitized.py)

long: venv $(VENV)/.examples
	$(MAKE) --no-print-directory -j2 long-waiting long-others

long-waiting:
	$(PYTEST) -m long $(WAITING)

long-others:
	$(PYTEST) -m long tests $(addprefix --ignore=,$(WAITING) $(ELSEWHERE))

asan: venv
	$(PYTEST) tests/test_c.py -k "address"
	$(PYTEST) -m "long or not long" tests/test_sanitized.py

tsan: venv
	$(PYTEST) -m "long or not long" tests/test_c.py -k "thread"
	$(PYTEST) -m "long or not long" tests/test_load.py tests/test_cuda.py -k-thread

SECONDS ?= 300
fuzz: venv
	$(RUN) tests/fuzz/run.py --seconds $(SECONDS)

model:
	$(PYTHON) tests/model/check.py

analyze: venv
	$(RUN) tests/analyze.py

cuda: venv
	$(PYTEST) tests/test_cuda_build.py tests/test_nccl_header.py

emulate: venv
	$(PYTEST) -m "long or not long" tests/test_cuda.py tests/test_gpu_arrays.py

bench: venv
	$(RUN) benchmarks/run.py

lint: venv
	$(PYTEST) tests/test_build.py

clean:
	rm -rf build dist *.egg-info zero_c/*.so $(VENV)/.built .pytest_cache .hypothesis
	find zero_c tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
