"""The CUDA backend on the emulated CUDA and NCCL of tests/cuda_emulation: every program of tests/cuda, the engine's
programs on emulated GPUs, plain and under sanitizers, and the proofs that kernels touch what they declare, no more and
no less, and that each wait of the backend is needed.
"""

import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy
import pytest

import cuda_arrays
import cuda_build
from cuda_build import CUDA as BACKEND
from cuda_build import ROOT
from dlpack_producer import CUDA, Producer
from rank_numbers import BFLOAT16
from test_c import run

RUN_DEADLINE_S = 400
PLUGIN_PROGRAM = "test_plugin"  # runs on a plugin made by nvcc: test_cuda_build.py
ENGINE = [ROOT / "tests" / "c" / name for name in ("test_engine.c", "test_stage3.c", "test_step.c")]
PROGRAMS = sorted(path for path in (ROOT / "tests" / "cuda").glob("test_*.c*") if path.stem != PLUGIN_PROGRAM) + ENGINE
NAMED = {program.stem: program for program in PROGRAMS}
# The thread sanitizer sees C only, and has something to see in what runs threads of its own.
THREADED = {"test_device", "test_nccl", "test_two_engines", "test_engine", "test_stage3", "test_step"}
# Kernels are compared with what they declare; of no interest in any other way is the program that tests this.
WATCHED = {"test_declared", "test_kernels", "test_device", "test_graph"}
SHORT = {("address", "test_kernels"), ("address", "test_device"), *(("watched", name) for name in WATCHED)}

pytestmark = cuda_build.needs_headers


def flavours_of(name):
    if name == "test_declared":
        return ["watched"]
    return ["plain", "address", *["thread"] * (name in THREADED), *["watched"] * (name in WATCHED)]


class Job(NamedTuple):
    """One run of a program."""

    name: str
    flavour: str = "plain"
    environment: tuple = ()


class Programs:
    """Runs programs two at a time, ahead of the tests that wait for them."""

    def __init__(self):
        self.pool, self.building, self.started = ThreadPoolExecutor(2), threading.Lock(), {}

    def start(self, job):
        if job not in self.started:
            self.started[job] = self.pool.submit(self._run, job)

    def _run(self, job):
        with self.building:
            program = cuda_build.program(NAMED[job.name], job.flavour)
        return run([program], RUN_DEADLINE_S, dict(job.environment))

    def result(self, job):
        """Status and output."""
        self.start(job)
        return self.started[job].result()


@pytest.fixture(scope="module")
def programs(request):
    programs = Programs()
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec") and "job" in item.callspec.params:
            programs.start(item.callspec.params["job"])
    yield programs
    programs.pool.shutdown(cancel_futures=True)


def cases():
    for program in PROGRAMS:
        for flavour in flavours_of(program.stem):
            short = flavour == "plain" or (flavour, program.stem) in SHORT
            yield pytest.param(Job(program.stem, flavour), id=f"{program.stem}-{flavour}",
                               marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize("job", list(cases()))
def test_program(programs, job):
    status, output = programs.result(job)
    assert status == 0, f"{job.name} ended with status {status}:\n{output}"


# ---- every wait of the backend is needed ---------------------------------------

# A wait, by file, function and call (and which one of several), and a program that fails when it is left out.
WAITS = {
    "cuda_options.c bring cudaStreamWaitEvent": "test_device",
    "cuda_options.c mark_used cudaStreamSynchronize": "test_device",
    "cuda_device.c synchronize cudaStreamSynchronize": "test_device",
    "cuda_device.c order_streams cudaStreamWaitEvent": "test_order",
    "cuda_memory.c discard_all cudaDeviceSynchronize": "test_device",
    "cuda_memory.c cuda_memory_zero cudaStreamSynchronize": "test_engine",
    "cuda_memory.c cuda_memory_zero cudaDeviceSynchronize": "test_device",
    "cuda_staging.c settle cudaEventSynchronize": "test_engine",
    "cuda_staging.c mark_busy cudaStreamSynchronize": "test_device",
    "nccl_ops.c start cudaStreamWaitEvent": "test_nccl",
    "nccl_ops.c start cudaStreamWaitEvent 2": "test_engine",
    "nccl_ops.c wait_on_stream cudaStreamWaitEvent": "test_engine",
}
# Waits that nothing misses, because something else makes sure of the same.
DOUBLED = {
    "cuda_memory.c mark cudaStreamWaitEvent": "nothing is freed before is_idle has asked every stream, too",
    "nccl_comm.c close_lane cudaStreamSynchronize": "ending the communicator waits for what the lane has",
}
SHORT_WAITS = {"cuda_device.c order_streams cudaStreamWaitEvent", "nccl_ops.c wait_on_stream cudaStreamWaitEvent"}
WAIT_CALL = re.compile(r"\b(cudaStreamWaitEvent|cuda(?:Event|Stream|Device)Synchronize)\b[(,]")
FUNCTION = re.compile(r"^[a-z].*?\b(\w+)\(.*[^;]$")


def wait_places():
    """key -> file:line of all waits in the backend's sources."""
    places = {}
    for source in sorted(BACKEND.glob("*.c*")):
        function = None
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if found := FUNCTION.match(line):
                function = found[1]
            if found := WAIT_CALL.search(line):
                key = first = f"{source.name} {function} {found[1]}"
                count = 1
                while key in places:
                    key = f"{first} {(count := count + 1)}"
                places[key] = f"{source.name}:{number}"
    return places


def test_every_wait_is_in_the_table():
    assert set(wait_places()) == set(WAITS) | set(DOUBLED)


@pytest.mark.long
def test_every_wait_is_reached(programs, tmp_path):
    seen = tmp_path / "sites"
    jobs = [Job(name, environment=(("EMU_WAIT_SITES", str(seen)),)) for name in sorted(set(WAITS.values()))]
    for job in jobs:
        programs.start(job)
    for job in jobs:
        programs.result(job)
    reached = {line.split()[0] for line in seen.read_text().splitlines()}
    assert set(wait_places().values()) == {place for place in reached if (BACKEND / place.split(":")[0]).exists()}


def runs_without_a_wait():
    places = wait_places()
    for wait, name in WAITS.items():
        environment = (("EMU_DROP_WAIT", places.get(wait, "nowhere")), ("EMU_DEADLOCK", "2"))
        yield pytest.param(Job(name, environment=environment), id=wait,
                           marks=[] if wait in SHORT_WAITS else [pytest.mark.long])


@pytest.mark.parametrize("job", list(runs_without_a_wait()))
def test_a_wait_left_out_is_missed(programs, job):
    status, output = programs.result(job)
    assert status != 0, f"{job.name} does not miss it:\n{output}"


# ---- arrays of tests, cuda_arrays.py -----------------------------------------


@pytest.fixture
def machine():
    cuda_arrays.reset(seed=1)
    yield
    gc.collect()
    assert cuda_arrays.findings() == []
    assert cuda_arrays.leaks() == []


class Legacy:
    """An exporter from before DLPack 1.0."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


ARRAYS = [numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4), numpy.array(1.5), numpy.zeros((0, 3)),
          numpy.arange(5, dtype=numpy.uint8), numpy.arange(6, dtype=numpy.int64).reshape(3, 2).T,
          numpy.arange(6, dtype=numpy.float16)[::-2], numpy.arange(4, dtype=numpy.uint16).view(BFLOAT16)]


@pytest.mark.parametrize("exporter", [lambda array: array, Legacy], ids=["versioned", "legacy"])
@pytest.mark.parametrize("values", ARRAYS, ids=lambda values: f"{values.dtype}-{values.ndim}")
def test_arrays_come_back(machine, values, exporter):
    there = cuda_arrays.to_gpu(values)
    assert there.__dlpack_device__() == (2, 0)
    back = cuda_arrays.to_host(exporter(there))
    assert back.dtype == values.dtype and back.shape == values.shape and back.tobytes() == values.tobytes()


def test_strided_exports_are_read_where_they_lie(machine):
    values = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    there = cuda_arrays.to_gpu(values)
    view = Producer(values[:, ::-2], device=(CUDA, 0), data=there.address + 3 * 4)
    assert cuda_arrays.to_host(view).tolist() == values[:, ::-2].tolist()
    assert view.deleted == 1


def test_capsules_keep_memory_until_they_are_given_back(machine):
    values = numpy.arange(4, dtype=numpy.float32)
    for keywords in ({}, {"max_version": (1, 0)}):
        capsule = cuda_arrays.to_gpu(values).__dlpack__(**keywords)
        assert len(cuda_arrays.leaks()) == 1
        del capsule  # not taken by anybody
        assert cuda_arrays.leaks() == []


def test_the_consumer_names_the_stream(machine):
    writes, reads = cuda_arrays.new_stream(), cuda_arrays.new_stream()
    values = numpy.arange(4, dtype=numpy.float32)
    there = cuda_arrays.to_gpu(values, stream=writes)
    assert cuda_arrays.to_host(there, reads).tolist() == values.tolist()
    assert cuda_arrays.to_host(there).tolist() == values.tolist()
    with pytest.raises(BufferError):
        there.__dlpack__(stream=2)
    del there
    assert cuda_arrays.leaks() == ["stream on device 0"] * 2
    for stream in (writes, reads):
        cuda_arrays.close_stream(stream)


@pytest.mark.parametrize("mistake", ["read without order", "given back too soon"])
def test_mistakes_of_a_consumer_are_found(mistake):
    cuda_arrays.reset()
    writes, reads = cuda_arrays.new_stream(), cuda_arrays.new_stream()
    there = cuda_arrays.to_gpu(numpy.arange(4, dtype=numpy.float32), stream=writes)
    there.__dlpack__(stream=cuda_arrays.NO_STREAM if mistake == "read without order" else reads)
    target = cuda_arrays.to_gpu(numpy.zeros(4, numpy.float32), stream=reads)
    cuda_arrays.call("cudaMemcpyAsync", target.address, there.address, 16, 3, reads)
    if mistake == "given back too soon":
        assert cuda_arrays.findings() == []
        del there
    assert any(line.startswith("unordered:") for line in cuda_arrays.findings())
    cuda_arrays.reset()


def test_every_rank_has_its_gpu(machine):
    there = cuda_arrays.to_gpu(numpy.ones(3), device=3)
    assert there.__dlpack_device__() == (2, 3) and cuda_arrays.to_host(there).tolist() == [1, 1, 1]
