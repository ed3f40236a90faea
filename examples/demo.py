"""Trains a small GPT on the source of the Python library, on two ranks at stages 0 to 3 and with PyTorch's own data
parallelism, and shows what each run held, sent and reached. Writes demo_out/demo.png and demo_out/demo.json.

    python examples/demo.py
    python examples/demo.py --profile trace.json --memory-png memory.png    # and a closer look at single steps
"""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import timeline

HERE = pathlib.Path(__file__).resolve().parent
DDP = "ddp"


# ---- what the documentation promises, for an fp32 model and Adam -------------------------------

def formula_bytes(stage, ranks):
    """Bytes per parameter and rank: parameter 4, gradient 4, Adam's moments 8; what a stage shards is divided."""
    return {0: 16, 1: 8 + 8 / ranks, 2: 4 + 12 / ranks, 3: 16 / ranks, DDP: 16}[stage]


def formula_elements(stage, parameters, there):
    """Elements sent per step with one backward: a reduce-scatter and an all-gather. Stage 3 gathers for forward and
    for backward, except what is still there when backward begins."""
    return 3 * parameters - there if stage == 3 else 2 * parameters


# ---- one run ------------------------------------------------------------------------------------

class Progress:
    """A bar that redraws itself on a terminal, and a line every tenth of the way elsewhere."""

    def __init__(self, title, total):
        self.title, self.total, self.live, self.tenth = title, total, sys.stdout.isatty(), 0

    def show(self, done, text):
        if self.live:
            width = 28
            full = width * done // self.total
            sys.stdout.write(f"\r\033[K{self.title:>8} [{'#' * full}{'.' * (width - full)}] {done}/{self.total}  {text}")
            sys.stdout.flush()
        elif done * 10 // self.total > self.tenth:
            self.tenth = done * 10 // self.total
            print(f"{self.title:>8} {done}/{self.total}  {text}", flush=True)

    def end(self):
        if self.live:
            print()


def read_lines(path, records, offset):
    """Appends the complete JSON lines from `offset` on; the offset to go on from."""
    if path.exists():
        with open(path, "rb") as f:
            f.seek(offset)
            new = f.read()
        complete = new[:new.rfind(b"\n") + 1]
        records.extend(map(json.loads, complete.splitlines()))
        offset += len(complete)
    return offset


def trace_file(stage, out):
    return out / f"run_{stage}.trace.json"


def run(stage, args, out):
    """Trains in fresh processes; the records of each rank."""
    title = "DDP" if stage == DDP else f"stage {stage}"
    log = out / f"run_{stage}"
    for old in out.glob(f"run_{stage}.*"):
        old.unlink()
    script = ["train_gpt_ddp.py"] if stage == DDP else ["train_gpt.py", "--stage", str(stage)]
    if stage != DDP and args.profile:
        script += ["--profile", str(trace_file(stage, out))]
    if stage != DDP and args.memory_png:
        script.append("--watch-memory")
    command = [sys.executable, "-m", "zero_c.launch", "-n", str(args.ranks), str(HERE / script[0]), *script[1:],
               "--steps", str(args.steps), "--log", str(log)]
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONUNBUFFERED="1")
    bar, mine, offset, held = Progress(title, args.steps), [], 0, 0
    bar.show(0, "starting")
    text_path = out / f"run_{stage}.txt"
    with open(text_path, "wb") as text:
        ranks = subprocess.Popen(command, stdout=text, stderr=text, env=env, cwd=out)
        try:
            while True:
                ended = ranks.poll() is not None
                offset = read_lines(pathlib.Path(f"{log}.0.jsonl"), mine, offset)
                steps = [r for r in mine if "step" in r]
                if steps:
                    last = steps[-1]
                    held = next((r["held"] for r in reversed(steps) if r["held"] is not None), held)
                    speed = args.ranks * last["tokens"] * last["step"] / last["seconds"]
                    bar.show(last["step"], f"loss {float.fromhex(last['loss']):.3f}  {speed:,.0f} tokens/s  "
                                           f"{held / 2**20:.0f} MiB a rank")
                if ended:
                    break
                time.sleep(0.2)
        except BaseException:
            ranks.terminate()
            ranks.wait()
            raise
    bar.end()
    if ranks.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {ranks.returncode}:\n"
                 + "\n".join(text_path.read_text(errors="replace").splitlines()[-60:]))
    logs = []
    for rank in range(args.ranks):
        records = []
        read_lines(pathlib.Path(f"{log}.{rank}.jsonl"), records, 0)
        logs.append(records)
    return logs


# ---- what the runs say --------------------------------------------------------------------------

def summary(stage, logs):
    """One run as a dict, of figures per rank the mean."""
    steps = [[r for r in records if "step" in r] for records in logs]
    ends = [next(r for r in records if "digest" in r) for records in logs]
    psi, ranks, count = ends[0]["parameters"], len(logs), len(steps[0])
    mean = lambda values: sum(values) / ranks
    row = dict(
        stage=stage, parameters=psi, ranks=ranks,
        formula=formula_bytes(stage, ranks), seen=mean([e["held"] for e in ends]) / psi,
        formula_elements=formula_elements(stage, psi, ends[0].get("there")),
        losses=[mean([float.fromhex(r["loss"]) for r in at]) for at in zip(*steps)],
        loss_bits=[[r["loss"] for r in records] for records in steps],
        digests=[e["digest"] for e in ends], seconds=max(s[-1]["seconds"] for s in steps),
        sample=next((r["sample"] for r in logs[0] if "sample" in r), ""))
    if "memory" in ends[0]:
        row["counted"] = mean([e["memory"]["total"] - e["memory"]["buffers"] for e in ends]) / psi
        row["buffers"] = mean([e["memory"]["buffers"] for e in ends]) / psi
        row["elements"] = mean([e["traffic"][kind]["payload"] for e in ends
                                for kind in ("reduce_scatter", "all_gather")]) / count
        row["memory"] = ends[0]["memory"]
        row["traffic"] = ends[0]["traffic"]
        row["memory_over_step"] = next((r["memory_over_step"] for r in logs[0] if "memory_over_step" in r), None)
    return row


def table(rows):
    """The figures side by side. Bits agree when every loss of every rank, all final parameters and the text do."""
    reference = next(r for r in rows if r["stage"] == 0)
    lines = [("", "B/param", "", "", "", "elements a step", "", "final", "same bits as"),
             ("", "formula", "counted", "+ buffers", "OS saw", "formula", "sent", "loss", "stage 0")]
    for row in rows:
        bits = (row["loss_bits"] == reference["loss_bits"] and set(row["digests"]) == set(reference["digests"])
                and row["sample"] == reference["sample"])
        if row["stage"] == DDP:
            equal = [a == b for a, b in zip(zip(*row["loss_bits"]), zip(*reference["loss_bits"]))]
            counted = ["", "", f"{row['seen']:.2f}", "", ""]
            bits = f"first {(equal + [False]).index(False)} losses"
        else:
            row["same_bits"] = bits and len(set(row["digests"])) == 1
            counted = [f"{row['counted']:.2f}", f"{row['buffers']:.2f}", f"{row['seen']:.2f}"]
            counted += [f"{row['formula_elements']:,}", f"{row['elements']:,.0f}"]
            bits = ("all ranks" if row is reference else "yes") if row["same_bits"] else "NO"
        last = row["losses"][-20:]
        lines.append(("DDP" if row["stage"] == DDP else f"stage {row['stage']}", f"{row['formula']:.2f}", *counted,
                      f"{sum(last) / len(last):.4f}", bits))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    ruled = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    ruled.insert(2, "-" * max(map(len, ruled)))
    return "\n".join(ruled)


def draw(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, bars) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    styles = {0: ("-", 7), 1: ("-", 4.5), 2: ("-", 2.5), 3: ("--", 1.2), DDP: (":", 1.2)}
    for row in rows:
        style, width = styles[row["stage"]]
        smooth = [sum(row["losses"][max(0, i - 9):i + 1]) / min(i + 1, 10) for i in range(len(row["losses"]))]
        curve.plot(range(1, len(smooth) + 1), smooth, style, linewidth=width,
                   label="DDP" if row["stage"] == DDP else f"stage {row['stage']}")
    curve.set(xlabel="step", ylabel="loss, nats a byte (mean of 10 steps)", title="Loss")
    curve.legend()

    parts = (("parameters", "#4c72b0"), ("gradients", "#dd8452"), ("optimizer_state", "#55a868"), ("buffers", "#c7c7c7"))
    for x, row in enumerate(rows):
        bottom = 0
        for part, colour in parts if "memory" in row else ():
            height = row["memory"][part] / row["parameters"]
            bars.bar(x - 0.2, height, 0.38, bottom=bottom, color=colour, label=part.replace("_", " ") if x == 0 else None)
            bottom += height
        bars.bar(x + 0.2, row["seen"], 0.38, color="#444444", label="as the system saw it" if x == 0 else None)
        bars.hlines(row["formula"], x - 0.45, x + 0.45, colors="black", linestyles="dashed",
                    label="formula" if x == 0 else None)
    bars.set_xticks(range(len(rows)), ["DDP" if r["stage"] == DDP else f"stage {r['stage']}" for r in rows])
    bars.set(ylabel="bytes per parameter and rank", title=f"Memory, {rows[0]['parameters']:,} parameters, "
                                                          f"{rows[0]['ranks']} ranks")
    bars.set_ylim(0, 1.45 * max(r["seen"] for r in rows))
    bars.legend(fontsize=8, ncols=2, loc="upper center")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=160, help="the same for every run, so that losses compare")
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parent / "demo_out")
    parser.add_argument("--profile", type=pathlib.Path, metavar="FILE",
                        help="write when each rank computed, reduced, gathered and updated, in three steps of each stage: open "
                             "FILE in chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--memory-png", type=pathlib.Path, metavar="FILE",
                        help="draw the memory of rank 0 over one step of each stage")
    args = parser.parse_args()
    if (args.profile or args.memory_png) and args.steps < timeline.STEPS:
        parser.error(f"--steps is {args.steps}; --profile and --memory-png look at steps up to number {timeline.STEPS}")
    missing = [name for name in ("torch", "matplotlib", "zero_c") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the demo needs {', '.join(missing)} in {sys.executable}")
    args.out = args.out.resolve()   # the runs start there: the installed package is meant, not a source tree around us
    args.out.mkdir(parents=True, exist_ok=True)

    begin = time.monotonic()
    rows = [summary(stage, run(stage, args, args.out)) for stage in (0, 1, 2, 3, DDP)]
    print("\n" + table(rows))
    print("""
B/param: bytes per parameter and rank. Buffers: windows in which gradients are added up, and at stage 3 room for
two blocks, however many there are. DDP's update is torch's own, which rounds differently in the last bits: its
first loss must be the same, later ones part slowly.""")
    print(f"\nwritten by the model of stage 3, still in shards, after {args.steps} steps:\n")
    print("\n".join("    " + line for line in rows[3]["sample"].splitlines()))
    (args.out / "demo.json").write_text(json.dumps(rows, indent=1))
    draw(rows, args.out / "demo.png")
    sharded = [row for row in rows if row["stage"] != DDP]
    if args.profile:
        timeline.merge_traces({row["stage"]: trace_file(row["stage"], args.out) for row in sharded}, args.profile)
        print(f"\n{args.profile} written: open it in chrome://tracing or https://ui.perfetto.dev")
    if args.memory_png:
        timeline.draw_memory(sharded, args.memory_png)
        print(f"\n{args.memory_png} written")
    print(f"\n{args.out / 'demo.png'} and demo.json written; {time.monotonic() - begin:.0f} s in all")
    if not all(row["same_bits"] for row in rows if row["stage"] != DDP):
        sys.exit("the stages do not agree bit for bit: this is a bug, please report it with demo.json")


if __name__ == "__main__":
    main()
