"""A closer look at a few steps of a training script: when each rank does what (--profile), and the memory that it holds
meanwhile (--watch-memory). timeline.py makes the files and pictures of it."""
import contextlib
import threading
import time

from meter import held_bytes
from timeline import PROFILED, SAMPLED

EVERY_S = 0.002


class Sampler:
    """Reads this process's memory in a thread of its own, and at the beginning and end of each phase."""

    def __init__(self, base):
        self.base, self.samples, self.phases = base, [], []
        self.lock, self.stopped, self.begin_ns = threading.Lock(), threading.Event(), time.monotonic_ns()

    def sample(self):
        """One sample: (milliseconds since the beginning, bytes)."""
        with self.lock:     # the time is that of the value, and samples are in order
            self.samples.append(((time.monotonic_ns() - self.begin_ns) / 1e6, held_bytes() - self.base))

    def __enter__(self):
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self):
        while not self.stopped.wait(EVERY_S):
            self.sample()

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    @contextlib.contextmanager
    def phase(self, name):
        self.sample()
        begin_ms = (time.monotonic_ns() - self.begin_ns) / 1e6
        yield
        self.phases.append((name, begin_ms, (time.monotonic_ns() - self.begin_ns) / 1e6))
        self.sample()


class Watch:
    """Around the steps of a training, `with watch.step(number):`, and around their phases, `with watch.phase(name):`.

    profile     an optimizer's profile(), or None
    memory_base bytes that the process held before there was a model; None: memory is not looked at
    """

    def __init__(self, profile=None, memory_base=None):
        self.profile, self.memory_base = profile, memory_base
        self.sampler = None
        self.memory = None      # after the step that was sampled: {"samples": ..., "phases": ...}

    @contextlib.contextmanager
    def step(self, number):
        if self.profile is not None and number in PROFILED:
            with self.profile:
                yield
        elif self.memory_base is not None and number == SAMPLED:
            with Sampler(self.memory_base) as self.sampler:
                yield
            self.memory = {"samples": self.sampler.samples, "phases": self.sampler.phases}
            self.sampler = None
        else:
            yield

    @contextlib.contextmanager
    def phase(self, name):
        with contextlib.ExitStack() as stack:
            if self.profile is not None:
                stack.enter_context(self.profile.span(name))
            if self.sampler is not None:
                stack.enter_context(self.sampler.phase(name))
            yield
