"""The tables of a benchmark's JSON, with the project's targets beside what was measured: report.py FILE.json"""
import json
import statistics
import sys

REFERENCE = "ddp_view"
TOLERANCE = 1e-4        # between losses of peers that should train alike, relative to the larger of 1 and the loss


# ---- figures from runs ---------------------------------------------------------------------------

def step_times(run):
    """Seconds of each timed step: the slower rank's."""
    return [max(pair) for pair in zip(*(rank["walls"] for rank in run["ranks"]))]


def losses(run):
    """Mean over ranks, per step."""
    return [statistics.mean(float.fromhex(x) for x in at) for at in zip(*(rank["losses"] for rank in run["ranks"]))]


def disagreement(run, reference, apart):
    """Largest relative difference of losses; only the first one where the ranks train apart."""
    pairs = list(zip(losses(run), losses(reference)))
    return max(abs(a - b) / max(1, abs(b)) for a, b in (pairs[:1] if apart else pairs))


def peak(run, column):
    """(bytes, where) of the mark at which the ranks together held most, per rank.

    Not the mean of each rank's own peak: memory that ranks share belongs to the rank that touched it first, until the
    others have touched it too.
    """
    marks = list(zip(*(rank["memory"]["samples"] for rank in run["ranks"])))
    return max((statistics.mean(sample[column] for sample in mark), mark[0][0]) for mark in marks)


def summarize(runs):
    """Of one peer and workload over all rounds."""
    times = [1e3 * t for run in runs for t in step_times(run)]
    ranks = [rank for run in runs for rank in run["ranks"]]
    wall = sum(run["ranks"][0]["machine"][3] for run in runs)
    busy = sum(run["ranks"][0]["machine"][0] for run in runs)
    own = sum(rank["machine"][2] for rank in ranks)
    memory = [rank["memory"] for rank in ranks if rank["memory"]]
    sampled = next((run for run in runs if run["ranks"][0]["memory"]), None)
    elements = ranks[0]["elements"]
    counted = [rank["counted"]["total"] for rank in ranks if rank["counted"]]
    return dict(
        elements=elements, tensors=ranks[0]["tensors"], median=statistics.median(times), least=min(times),
        cpu=1e3 * statistics.median(c for rank in ranks for c in rank["cpu"]),
        phases=[1e3 * statistics.median(p[k] for rank in ranks for p in rank["phases"]) for k in range(3)],
        faults=statistics.median(f for rank in ranks for f in rank["faults"]) / 256,
        others=(busy - own) / wall if wall else 0.0,
        stolen=sum(run["ranks"][0]["machine"][1] for run in runs) / wall if wall else 0.0,
        by_round={run["round"]: statistics.median(step_times(run)) for run in runs},
        peak=peak(sampled, 1)[0] / elements if sampled else None,
        peak_own=peak(sampled, 2)[0] / elements if sampled else None,
        where=peak(sampled, 1)[1] if sampled else None,
        live=statistics.mean(m["live"][0] for m in memory) / elements if memory else None,
        counted=statistics.mean(counted) / elements if counted else None,
        shm_left=max(run["shm_left"] for run in runs), steps=len(times))


def ratio(peer, other):
    """Median and range over rounds of the ratio of a round's medians: rounds are neighbours in time."""
    both = [peer["by_round"][r] / other["by_round"][r] for r in peer["by_round"] if r in other["by_round"]]
    return (statistics.median(both), min(both), max(both)) if both else None


def figures(data):
    """{workload: {peer: summary, or a text that says why there is none}}"""
    out = {}
    for workload in dict.fromkeys(run["workload"] for run in data["runs"]):
        runs = [run for run in data["runs"] if run["workload"] == workload]
        names = list(dict.fromkeys(run["peer"] for run in runs))
        good = {n: [r for r in runs if r["peer"] == n and "ranks" in r] for n in names}
        # peers are held against the reference, or against the first that trains together
        reference = next((good[n][0] for n in [REFERENCE, *names] if good.get(n) and n != "none2"), None)
        out[workload] = {}
        for name in names:
            errors = [r["error"] for r in runs if r["peer"] == name and "error" in r]
            off = max((disagreement(r, reference, name == "none2") for r in good[name]), default=0) if reference else 0
            if not good[name]:
                out[workload][name] = f"failed: {errors[-1]}"
            elif off > TOLERANCE or off != off:
                out[workload][name] = f"losses differ from the other peers' by {off:.1e}: no time is given"
            else:
                out[workload][name] = dict(summarize(good[name]), failed=len(errors), off=off,
                                           bits=[rank["losses"] for rank in good[name][0]["ranks"]])
    return out


# ---- targets -------------------------------------------------------------------------------------

def targets(data, peers):
    """Rows (what, wanted, measured text, "ok" | "missed" | "not measured")."""
    rows = []

    def row(what, limit, value, form="{:.2f}", least=False, extra=""):
        if value is None:
            rows.append((what, ("≥ " if least else "≤ ") + form.format(limit), "", "not measured"))
        else:
            met = value >= limit if least else value <= limit
            rows.append((what, ("≥ " if least else "≤ ") + form.format(limit), form.format(value) + extra,
                         "ok" if met else "missed"))

    def get(workload, peer):
        found = peers.get(workload, {}).get(peer)
        return found if isinstance(found, dict) else None

    for workload, peer, other, limit in (
            ("flat64m", "zero_c_2", "ddp_view", 0.40), ("flat64m", "zero_c_2_shared", "ddp_view", 0.33),
            ("many_small", "zero_c_2", "none2", 0.9), ("gpt", "zero_c_2", "none2", 1.05),
            ("flat64m", "zero_c_3", "ddp_view", 0.60), ("many_small", "zero_c_3", "none2", 1.2),
            ("gpt", "zero_c_3", "none2", 1.15)):
        a, b = get(workload, peer), get(workload, other)
        r = ratio(a, b) if a and b else None
        row(f"{workload}: step time {peer} / {other}", limit, r and r[0],
            extra=f" ({r[1]:.2f} to {r[2]:.2f})" if r else "")
    for workload, peer, limit in (
            ("flat64m", "zero_c_0", 17.0), ("flat64m", "zero_c_1", 13.0), ("flat64m", "zero_c_2", 12.1),
            ("flat64m", "zero_c_0_shared", 15.0), ("flat64m", "zero_c_1_shared", 11.0),
            ("flat64m", "zero_c_2_shared", 10.1), ("flat64m_bf16", "zero_c_2", 10.9)):
        found = get(workload, peer)
        row(f"{workload}: peak memory of {peer}, B/param", limit, found and found["peak"], "{:.1f}")

    kernels = data["native"].get("kernel_rates")
    barrier = data["native"].get("barrier_time")
    row("AdamW, GB/s over read-modify-write", 0.85,
        kernels["adamw"][2] / kernels["read_modify_write"][2] if isinstance(kernels, dict) else None, least=True)
    row("barrier, 2 ranks on 2 cores, µs", 1.0, 1e6 * barrier["2"] if isinstance(barrier, dict) else None)
    row("barrier, 8 ranks on 2 cores, µs", 50.0, 1e6 * barrier["8"] if isinstance(barrier, dict) else None, "{:.1f}")
    return rows


# ---- text ----------------------------------------------------------------------------------------

def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def optional(value, form="{:.1f}"):
    return "" if value is None else form.format(value)


def workload_text(workload, peers):
    good = {name: s for name, s in peers.items() if isinstance(s, dict)}
    parts = [f"## {workload}"]
    if good:
        one = next(iter(good.values()))
        parts[0] += f": {one['elements']:,} parameters in {one['tensors']:,} tensors"
        ratios = {}
        for name, s in good.items():
            ratios[name] = [f"{r[0]:.2f}" if (r := ratio(s, good[other])) else ""
                            for other in (REFERENCE, "none2") if other in good]
        others = [f"/ {other}" for other in (REFERENCE, "none2") if other in good]
        parts.append(table(
            ["peer", "median ms", "min ms", *others, "CPU ms a rank", "forward + backward + step", "new MiB a step",
             "others' cores", "stolen", "steps"],
            [[name, f"{s['median']:.1f}", f"{s['least']:.1f}", *ratios[name], f"{s['cpu']:.0f}",
              " + ".join(f"{p:.0f}" for p in s["phases"]), f"{s['faults']:.0f}", f"{s['others']:.2f}",
              f"{s['stolen']:.2f}", s["steps"]] for name, s in good.items()]))
        parts.append(table(
            ["peer", "peak B/param", "seen at", "without file pages", "after trim", "counted by the engine",
             "left in /dev/shm", "losses off by"],
            [[name, optional(s["peak"], "{:.2f}"), s["where"] or "", optional(s["peak_own"], "{:.2f}"),
              optional(s["live"], "{:.2f}"), optional(s["counted"], "{:.2f}"), f"{s['shm_left']:,}", f"{s['off']:.0e}"]
             for name, s in good.items()]))
        ours = [s["bits"] for name, s in good.items() if name.startswith("zero_c") and "clip" not in name]
        if len(ours) > 1:
            shortest = min(len(x[0]) for x in ours)
            same = all([r[:shortest] for r in x] == [r[:shortest] for r in ours[0]] for x in ours)
            parts.append(f"All bits of the losses of the {len(ours)} zero_c runs agree: {'yes' if same else 'NO'}.")
    parts += [f"{name}: {text}" for name, text in peers.items() if isinstance(text, str)]
    parts += [f"{name}: {s['failed']} rounds failed." for name, s in good.items() if s["failed"]]
    return "\n\n".join(parts)


def native_text(found):
    parts = []
    kernels = found.get("kernel_rates")
    if isinstance(kernels, dict):
        copy = kernels["copy_stream"][2]
        parts.append(f"Loops of the core ({kernels['isa']}), two cores at once, GB/s of one core; each byte that must "
                     "be read or written counts once:")
        parts.append(table(["loop", "bytes an element", "ms for 32 Mi", "GB/s", "/ copy_stream"],
                           [[name, k[0], f"{1e3 * k[1]:.1f}", f"{k[2]:.1f}", f"{k[2] / copy:.2f}"]
                            for name, k in kernels.items() if name != "isa"]))
    engine = found.get("engine_parts")
    if isinstance(engine, dict) and isinstance(kernels, dict):
        parts.append("Parts of a step in C, 64 Mi fp32 parameters, two ranks, ms; update and gather from step() with "
                     "shared parameters (which gathers nothing) and the difference to private ones. Beside each part "
                     "of stages 1 and 2, the bytes a rank must move at the copy rate above, over the time it took:")
        psi = 64 * 2**20
        at_copy = lambda nbytes: nbytes * psi / (1e9 * kernels["copy_stream"][2])
        rows = []
        for name, p in engine.items():
            reduced = p["add_grad"] + p["end_round"]
            stage, kind = name.split()[1:]
            shared = engine.get(f"stage {stage} shared")
            update = shared["step"] if shared else None
            gather = p["step"] - update if shared and kind == "private" else None
            share = lambda nbytes, took: f" ({at_copy(nbytes) / took:.2f})" if took and took > 0 else ""
            rows.append([name, f"{1e3 * p['add_grad']:.0f} + {1e3 * p['end_round']:.0f}{share(10, reduced)}",
                         f"{1e3 * p['step']:.0f}", f"{1e3 * update:.0f}{share(14, update)}" if update else "",
                         f"{1e3 * gather:.0f}{share(4, gather)}" if gather is not None else ""])
        parts.append(table(["engine", "hand over + reduce (10 B/param)", "step()", "update (14 B)", "gather (4 B)"],
                           rows))
    barrier = found.get("barrier_time")
    if isinstance(barrier, dict):
        python = {n: found.get(f"python_barrier_{n}") for n in (2, 8)}
        parts.append(table(["barrier", "from C, µs", "from Python, µs"],
                           [[f"{n} ranks on 2 cores", f"{1e6 * barrier[str(n)]:.2f}",
                             f"{1e6 * python[n]:.2f}" if isinstance(python[n], float) else ""] for n in (2, 8)]))
    parts += [text for text in found.values() if isinstance(text, str)]
    return "\n\n".join(["## Parts", *parts]) if parts else ""


def markdown(data):
    m, s = data["machine"], data["settings"]
    peers = figures(data)
    text = [f"# Benchmark of {data['began']}",
            f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB; Linux {m['kernel']}, {m['libc']}, Python "
            f"{m['python']}, torch {m['torch']}, numpy {m['numpy']}, zero_c {m['zero_c']} (commit {m.get('commit', 'not noted')}); transparent huge pages "
            f"{m['huge_pages']}. Two ranks, one core and one torch thread each; {s['rounds']} rounds of {s['steps']} "
            f"steps after {s['warm_up']} to warm up; malloc: {s['malloc']}.",
            "## Targets",
            table(["target", "wanted", "measured", ""], targets(data, peers))]
    text += [workload_text(w, p) for w, p in peers.items()]
    text.append(native_text(data["native"]))
    return "\n\n".join(t for t in text if t) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        print(markdown(json.load(f)))
