"""opt.profile() and the examples' closer look: the trace has every piece of work once, at its time, and changes nothing; the
picture shows what was sampled.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import rank_profile
from ranks import RankGroup, python_path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS = 2
STEPS = rank_profile.STEPS
PHASES = ["forward", "backward", "step"]
KINDS = {"compute", "reduce", "gather", "update"}
INSIDE = {"reduce": {"backward", "step"}, "update": {"step"}, "gather": {"step"}}  # which of the program's spans has the work


@pytest.fixture(scope="module")
def pair():
    pytest.importorskip("torch")
    with RankGroup(RANKS) as group:
        yield group


@pytest.fixture(scope="module")
def traced(pair, tmp_path_factory):
    """stage -> (what each rank counted, the trace's path)."""
    done = {}

    def trace(stage):
        if stage not in done:
            path = tmp_path_factory.mktemp("trace") / "trace.json"
            done[stage] = (pair.run(rank_profile.trained, stage, str(path)), path)
        return done[stage]

    return trace


def spans_of(trace):
    """The trace's spans by (process, lane's name), in order of time; what does not fit the trace event format fails."""
    assert isinstance(trace["traceEvents"], list)
    named, spans = {}, {}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "args"} <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"].endswith("name"):
                named[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X" and isinstance(event["cat"], str)
        begin, length = (round(event[key] * 1000) for key in ("ts", "dur"))
        assert begin >= 0 and length >= 0
        lane = named["thread_name", event["pid"], event["tid"]]
        spans.setdefault((named["process_name", event["pid"], 0], lane), []).append((begin, begin + length, event))
    return {key: sorted(found, key=lambda span: span[:2]) for key, found in spans.items()}


def check_apart(spans):
    for (_, end, before), (begin, _, after) in itertools.pairwise(spans):
        assert end <= begin, (before, after)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_trace_has_all_work_once_and_in_its_place(traced, stage):
    counted, path = traced(stage)
    trace = json.loads(path.read_text())
    spans = spans_of(trace)
    assert set(spans) == {(f"rank {rank}", kind) for rank in range(RANKS) for kind in KINDS}
    assert trace["otherData"]["lost"] == [0] * RANKS
    assert min(found[0][0] for found in spans.values()) == 0
    for rank, row in enumerate(counted):
        for kind in KINDS:
            check_apart(spans[f"rank {rank}", kind])
        program = spans[f"rank {rank}", "compute"]
        assert [event["name"] for _, _, event in program] == PHASES * STEPS
        for kind, places in INSIDE.items():
            if kind == "gather" and stage == 3:
                places = {"forward", "backward"}
            for begin, end, event in spans[f"rank {rank}", kind]:
                assert event["cat"] == kind and event["name"].startswith(f"{kind} ")
                assert any(first <= begin and end <= last for first, last, around in program if around["name"] in places), event

        work = {kind: [event["args"] for _, _, event in spans[f"rank {rank}", kind]] for kind in INSIDE}
        traffic, buckets = row["traffic"], range(row["buckets"])
        assert Counter(facts["bucket"] for facts in work["reduce"]) == dict.fromkeys(buckets, STEPS)
        assert len(work["reduce"]) == traffic["reduce_scatter"]["calls"]
        assert sum(facts["bytes"] for facts in work["reduce"]) == traffic["reduce_scatter"]["bytes"]
        assert Counter(facts["bucket"] for facts in work["update"]) == dict.fromkeys(buckets, STEPS * (RANKS if stage == 0 else 1))
        assert all(facts["bytes"] > 0 for facts in work["update"])
        assert len(work["gather"]) == traffic["all_gather"]["calls"]  # of one other rank's slice each
        assert sum(facts["bytes"] for facts in work["gather"]) == traffic["all_gather"]["bytes"]
        if stage == 3:
            assert {facts["unit"] for facts in work["gather"]} == {"root", "blocks.0", "blocks.1", "blocks.2"}
        else:
            assert {facts["from rank"] for facts in work["gather"]} == {1 - rank}
            assert Counter(facts["bucket"] for facts in work["gather"]) == dict.fromkeys(buckets, STEPS)


def test_ranks_share_a_clock(traced):
    """A step ends on no rank before it has begun on the other."""
    _, path = traced(2)
    spans = spans_of(json.loads(path.read_text()))
    steps = [[span for span in spans[f"rank {rank}", "compute"] if span[2]["name"] == "step"] for rank in range(RANKS)]
    for first, second in zip(*steps, strict=True):
        assert max(first[0], second[0]) < min(first[1], second[1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_off_it_records_nothing_and_on_it_changes_no_bit(pair, traced, stage):
    on, _ = traced(stage)
    for profiled, plain in zip(on, pair.run(rank_profile.trained, stage), strict=True):
        assert profiled["digest"] == plain["digest"]
        assert profiled["losses"] == plain["losses"]
        assert profiled["traffic"] == plain["traffic"]
        assert plain["spans"] == plain["lost"] == 0 and plain["left"] == [[], 0]
        assert profiled["left"] == [[], 0] and profiled["told"] == []
        kept_bytes = profiled["memory"] - plain["memory"]  # 16 bytes for each operation of a bucket and rank; the ring is gone
        assert kept_bytes == 16 * RANKS * (2 * profiled["buckets"] + 1)


def test_a_full_record_is_told(pair, tmp_path):
    path = tmp_path / "trace.json"
    for rank, row in enumerate(pair.run(rank_profile.trained, 2, str(path), capacity=5)):
        work = STEPS * 3 * row["buckets"]
        assert row["lost"] == work - STEPS * 5
        assert row["spans"] == STEPS * (3 + 5)
        assert len(row["told"]) == STEPS
        assert f"rank {rank}" in row["told"][0] and f"room for 5 pieces of work, and {work // STEPS - 5} more" in row["told"][0]
        assert json.loads(path.read_text())["otherData"]["lost"][rank] == row["lost"]


def test_what_cannot_be_done_is_said(pair, tmp_path):
    for rank, told in enumerate(pair.run(rank_profile.refused, str(tmp_path))):
        entered, inside, missing, *capacities, negative = told
        assert entered.startswith(f"Error: rank {rank}: the profile was entered already")
        assert inside.startswith(f"Error: rank {rank}: save() inside the profile")
        assert missing.startswith("Error: rank 0 could not write the trace to") and "missing" in missing
        assert [sentence.split(";")[0] for sentence in capacities] == [
            f"ValueError: capacity is {wrong}" for wrong in ("0", "True", "1.5")]
        assert negative.startswith("ValueError: capacity is -1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json"]


def test_arrays(pair, tmp_path):
    for row in pair.run(rank_profile.arrays, str(tmp_path / "trace.json")):
        assert row["kinds"] == ["gather", "reduce", "update"]
        assert row["reduces"] == row["buckets"] > 1
    assert {process for process, _ in spans_of(json.loads((tmp_path / "trace.json").read_text()))} == {"rank 0", "rank 1"}


# ---- what the demo makes of it ----------------------------------------------------------


@pytest.fixture(scope="module")
def timeline():
    pytest.importorskip("matplotlib")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(str(EXAMPLES))
        import timeline

        yield timeline


def check_merged(path):
    spans = spans_of(json.loads(path.read_text()))
    assert set(spans) == {(f"stage {stage}, rank {rank}", kind) for stage in range(4) for rank in range(RANKS) for kind in KINDS}
    for found in spans.values():
        check_apart(found)


def test_traces_of_the_stages_become_one(timeline, traced, tmp_path):
    timeline.merge_traces({stage: traced(stage)[1] for stage in range(4)}, tmp_path / "all.json")
    check_merged(tmp_path / "all.json")


def check_png(path):
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.endswith(b"IEND\xaeB`\x82")


def test_the_picture_shows_the_memory_that_was_sampled(timeline, pair, tmp_path):
    rows, batch, width = [], 4096, 256
    formula = {0: 16, 1: 12, 2: 10, 3: 8}
    for stage in range(4):
        first, _ = pair.run(rank_profile.memory_over_step, stage, batch, width)
        seen = first["seen"]
        times, held = zip(*seen["samples"], strict=True)
        assert list(times) == sorted(times)
        assert [name for name, _, _ in seen["phases"]] == PHASES
        bounds = [at for _, begin, end in seen["phases"] for at in (begin, end)]
        assert bounds == sorted(bounds) and times[-1] >= bounds[-1]
        kept_bytes = 3 * batch * width * 4  # inputs of the layers inside
        assert max(held) - held[0] > 0.8 * kept_bytes
        assert max(held) - held[-1] > 0.8 * kept_bytes
        rows.append({"stage": stage, "parameters": first["parameters"], "ranks": RANKS, "formula": formula[stage],
                     "memory_over_step": seen})
    axes = timeline.draw_memory(rows, tmp_path / "memory.png")
    check_png(tmp_path / "memory.png")
    lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    for row in rows:
        line = lines[f"stage {row['stage']}"]
        assert list(zip(line.get_xdata(), (round(value * 2**20) for value in line.get_ydata()), strict=True)) == [
            (at, held) for at, held in row["memory_over_step"]["samples"]]
        level = row["formula"] * row["parameters"] / 2**20
        dashed, = (line for label, line in lines.items() if label.startswith(f"stage {row['stage']} by the formula"))
        assert dashed.get_linestyle() == "--" and set(dashed.get_ydata()) == {level}
    assert {f"{phase} begins" for phase in PHASES} <= set(lines)
    assert axes.get_xlabel().endswith(", ms") and axes.get_ylabel().endswith(", MiB")


@pytest.mark.long
def test_demo(timeline, tmp_path):
    command = [sys.executable, EXAMPLES / "demo.py", "--steps", str(timeline.STEPS), "--out", tmp_path / "out",
               "--profile", tmp_path / "trace.json", "--memory-png", tmp_path / "memory.png"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600,
                          env={**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 0, done.stderr
    check_merged(tmp_path / "trace.json")
    check_png(tmp_path / "memory.png")


@pytest.mark.parametrize("option", ["--profile", "--memory-png"])
def test_demo_needs_some_steps(option):
    done = subprocess.run([sys.executable, EXAMPLES / "demo.py", "--steps", "2", option, "file"], text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 2 and "--steps is 2" in done.stderr
