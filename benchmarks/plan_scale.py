"""The tables of docs/scale.md: the planner's model for a cluster of GPUs, up to 4,096 ranks.

    python benchmarks/plan_scale.py        # prints them; tests/test_plan.py compares them with the document
"""
from zero_c.plan import Machine, counted, largest_model, plan

RANKS = (8, 64, 512, 4096)
STAGES = (0, 1, 2, 3)
DTYPE, TOKENS, FLOPS = "bfloat16", 8192, 4e14
LINK, LATENCY_S, MEMORY, CAPACITY = 50e9, 5e-6, 3e12, 80e9
MODELS = {"7.5 G": counted(int(7.5e9), DTYPE), "70 G": counted(int(70e9), DTYPE)}


def stages_of(model, ranks, hops="ring", bucket_mb=None):
    each = model.elements * TOKENS / FLOPS
    machine = Machine(LATENCY_S, LINK, LINK, MEMORY, hops)
    return plan(model, ranks, device="cuda", bucket_mb=bucket_mb, machine=machine, forward_seconds=2 * each,
                backward_seconds=4 * each).stages


def rows(head, cells):
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *("| " + " | ".join(row) + " |" for row in cells)]


def memory_table():
    head = ["parameters", "ranks", *(f"stage {stage}" for stage in STAGES)]
    return rows(head, [[name, f"{ranks:,}", *(f"{row.peak_bytes / 1e9:.1f}" for row in plan(
        model, ranks, device="cuda").stages.values())] for name, model in MODELS.items() for ranks in RANKS])


def largest_table():
    head = ["ranks", *(f"stage {stage}" for stage in STAGES)]
    return rows(head, [[f"{ranks:,}", *(f"{largest_model(CAPACITY, ranks, stage, dtype=DTYPE, device='cuda') / 1e9:.1f}"
                                       for stage in STAGES)] for ranks in RANKS])


def time_table(hops, bucket_mb):
    """Seconds of a step of 7.5 G parameters, and of it waiting; what it waits for."""
    head = ["ranks", *(f"stage {stage}" for stage in STAGES), "a reduce-scatter's latency", "and its bytes"]
    cells = []
    for ranks in RANKS:
        stages = stages_of(MODELS["7.5 G"], ranks, hops, bucket_mb)
        sent = stages[2].traffic["reduce_scatter"]
        moved = sent["bytes"] / LINK
        cells.append([f"{ranks:,}", *(f"{row.time.total:.2f} ({row.time.waiting:.2f})" for row in stages.values()),
                      f"{stages[2].time.reduce - moved:.3f}", f"{moved:.3f}"])
    return rows(head, cells)


def parts_table():
    head = ["parameters", "ranks", "stage", "compute", "reduce", "gather", "update", "total", "waiting"]
    cells = []
    for name, model in MODELS.items():
        for ranks in (64, 4096):
            for stage, row in stages_of(model, ranks, "tree", 25).items():
                time = row.time
                cells.append([name, f"{ranks:,}", str(stage), *(f"{part:.3f}" for part in (
                    time.compute, time.reduce, time.gather, time.update, time.total, time.waiting))])
    return rows(head, cells)


TABLES = {
    "peak memory of a rank, GB": memory_table,
    "largest model in 80 GB, 10^9 parameters": largest_table,
    "ring, buckets as the engine chooses them": lambda: time_table("ring", None),
    "ring, buckets of 256 MiB": lambda: time_table("ring", 256),
    "tree, buckets of 25 MiB": lambda: time_table("tree", 25),
    "parts, tree, buckets of 25 MiB": parts_table,
}


if __name__ == "__main__":
    for title, table in TABLES.items():
        print(title, "", *table(), "", sep="\n")
