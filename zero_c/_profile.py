"""When the ranks worked: the engine's record of it, and a file that chrome://tracing and Perfetto open.

    profile = opt.profile()
    for step, (x, y) in enumerate(data):
        with profile if step == 3 else contextlib.nullcontext():
            with profile.span("forward"):
                ...
    profile.save("trace.json")
"""

import contextlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import NamedTuple

from zero_c._checkpoint import all_texts, from_rank_0
from zero_c._core import Error

LANES = ("compute", "reduce", "gather", "update")  # the rows of a rank; nothing in a row overlaps
CAPACITY = 65536


class Span(NamedTuple):
    """A piece of work: in which lane, what, from when to when (CLOCK_MONOTONIC), and facts about it."""

    lane: str
    name: str
    begin_ns: int
    end_ns: int
    facts: dict


class Profile:
    """When this rank worked, while it is entered with `with`; may be entered again, and then collects more.

    spans   what was collected, of this rank, in order of time
    lost    pieces of work for which there was no room
    """

    def __init__(self, engine, comm, unit_names, capacity):
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ValueError(f"capacity is {capacity!r}; legal: 1 or a larger whole number")
        self.spans, self.lost = [], 0
        self._engine, self._comm, self._unit_names, self._capacity = engine, comm, unit_names, capacity
        self._on = False

    def __enter__(self):
        if self._on:
            raise Error(f"rank {self._comm.rank}: the profile was entered already; leave it before it is entered again")
        self._engine.profile(self._capacity)
        self._on = True
        return self

    def __exit__(self, kind, error, trace):
        self._on = False
        work, lost = self._engine.take_work()
        self._engine.profile(0)
        self.spans = sorted([*self.spans, *map(self._describe, work)], key=lambda span: span.begin_ns)
        self.lost += lost
        if lost:
            warnings.warn(f"rank {self._comm.rank}: the profile has room for {self._capacity} pieces of work, and {lost} more "
                          f"were lost; profile fewer steps, or give it more room: opt.profile(capacity=...)", RuntimeWarning,
                          stacklevel=2)

    @contextlib.contextmanager
    def span(self, name):
        """Around work of the program itself, in the lane "compute"; outside the profile it does nothing. Local."""
        if not self._on:
            yield
            return
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.spans.append(Span("compute", name, begin_ns, time.monotonic_ns(), {}))

    def save(self, path):
        """Writes what all ranks collected to one file, in the trace event format. Collective.

        Times in it are microseconds since the first span of any rank. zero_c.Error on all ranks if rank 0 cannot write it.
        """
        if self._on:
            raise Error(f"rank {self._comm.rank}: save() inside the profile; leave it first")
        ranks = all_texts(self._comm, json.dumps([self.spans, self.lost]).encode())
        failed = b""
        if self._comm.rank == 0:
            try:
                write_whole(path, trace_of([([Span(*span) for span in spans], lost) for spans, lost in map(json.loads, ranks)]))
            except OSError as error:
                failed = str(error).encode()
        failed = from_rank_0(self._comm, failed).decode()
        if failed:
            raise Error(f"rank 0 could not write the trace to {path}: {failed}")

    def _describe(self, work):
        """A piece of the engine's work as a span."""
        kind, number, peer, size_bytes, begin_ns, end_ns = work
        if kind == "gather" and self._unit_names is not None:
            unit = self._unit_names[number]
            return Span(kind, f"gather {unit}", begin_ns, end_ns, {"unit": unit, "bytes": size_bytes})
        facts = {"bucket": number, "bytes": size_bytes} | ({"from rank": peer} if kind == "gather" else {})
        return Span(kind, f"{kind} bucket {number}", begin_ns, end_ns, facts)


def trace_of(ranks):
    """The trace event format's object, of (spans, lost) by rank: a process for each rank, a thread for each lane."""
    origin_ns = min((span.begin_ns for spans, _ in ranks for span in spans), default=0)
    events = []
    for rank, (spans, _) in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        for lane, name in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}})
        events += [{"ph": "X", "name": span.name, "cat": span.lane, "pid": rank, "tid": LANES.index(span.lane),
                    "ts": (span.begin_ns - origin_ns) / 1000, "dur": (span.end_ns - span.begin_ns) / 1000, "args": span.facts}
                   for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"clock": "CLOCK_MONOTONIC", "origin_ns": origin_ns, "lost": [lost for _, lost in ranks]}}


def write_whole(path, value):
    """Writes a value as JSON; a file that was there before stays until the new one is complete."""
    path = Path(path)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(value, separators=(",", ":")))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
