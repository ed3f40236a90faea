"""Which steps of a training are looked at closely (watch.py does it), and what is made of what was seen: one trace of the
runs of several stages, and a picture of the memory over a step."""
import json
import pathlib

PROFILED = range(3, 6)      # steps, from 0; after those in which libraries load things and the allocator learns
SAMPLED = 7                 # another one: reading the memory takes time
STEPS = SAMPLED + 1         # a training needs at least so many
PHASES = ("forward", "backward", "step")


def merge_traces(traces, path):
    """Writes one trace: a process for each stage and rank. traces: stage -> the file of its run; each run begins at 0."""
    events, other = [], {}
    for stage, source in traces.items():
        trace = json.loads(pathlib.Path(source).read_text())
        first = 1 + max((event["pid"] for event in events), default=-1)
        for event in trace["traceEvents"]:
            arguments = dict(event["args"])
            if event["name"] == "process_name":
                arguments["name"] = f"stage {stage}, {arguments['name']}"
            elif event["name"] == "process_sort_index":
                arguments["sort_index"] += first
            events.append(event | {"pid": first + event["pid"], "args": arguments})
        other[f"stage {stage}"] = trace["otherData"]
    path = pathlib.Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":")))


def draw_memory(rows, path):
    """A picture of rows: {"stage", "parameters", "ranks", "formula" (bytes per parameter), "memory_over_step": what
    Watch.memory was on one rank}. Returns matplotlib's axes."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    mib = 2**20
    figure, axes = pyplot.subplots(figsize=(9, 5.2))
    marks = dict(zip(PHASES, "o^s"))
    for row, colour in zip(rows, ("#4c72b0", "#dd8452", "#55a868", "#c44e52")):
        seen = row["memory_over_step"]
        times, values = zip(*((at, held / mib) for at, held in seen["samples"]))
        axes.plot(times, values, color=colour, linewidth=1.6, label=f"stage {row['stage']}")
        level = row["formula"] * row["parameters"] / mib
        axes.axhline(level, color=colour, linestyle="dashed", linewidth=1,
                     label=f"stage {row['stage']} by the formula: {level:.0f} MiB")
        for name, begin, _ in seen["phases"]:
            nearest = min(range(len(times)), key=lambda k: abs(times[k] - begin))
            axes.plot(times[nearest], values[nearest], marks[name], color=colour, markersize=6)
    for name, mark in marks.items():
        axes.plot([], [], mark, color="#444444", label=f"{name} begins")
    axes.set(xlabel="time in one training step, ms", ylabel="memory held by rank 0, MiB",
             title=f"Memory over a step: {rows[0]['parameters']:,} parameters, {rows[0]['ranks']} ranks, Adam")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return axes
