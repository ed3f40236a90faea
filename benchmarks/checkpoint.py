"""Saving and loading against plain sequential writes and reads of the same bytes, in one interleaved run:

    python benchmarks/checkpoint.py [--rounds 5] [--quick]

Two ranks, a process each. In every round, one after the other, each between barriers on the slower rank's clock:

    write    each rank writes half of a checkpoint's bytes from memory to a file of its own, 1 MiB at a time, and fsync
    save     opt.save()
    read     each rank reads its file into memory that was touched before, 1 MiB at a time
    load     opt.load()
    protocol what a load must do at least, without anything of zero_c but the checksum: read a file and sum it up, 1 MiB at a
             time in one buffer, then read it again and copy that to its place

Reads are timed warm, and cold: after posix_fadvise(DONTNEED) on files that are on the disk. A rate's ratio is the median
over rounds of plain seconds / ours. Memory: what a rank's peak Rss rises by within a save and within a load, the second of
each; without pages of files. The result is results/checkpoint.md.
"""
import argparse
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
WORKLOADS = [("flat64m", 2), ("gpt", 2), ("gpt", 3), ("many_small", 2)]
CHUNK = 1 << 20
TARGET = 0.8
KINDS = {"save": "write", "load warm": "read warm", "protocol warm": "read warm", "load cold": "read cold"}


# ---- a rank ---------------------------------------------------------------------------------------


def rss(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def forget(paths):
    """The page cache lets go of the files, which are on the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def plain_write(path, memory):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(0, len(memory), CHUNK):
        os.write(file, memory[at:at + CHUNK])
    os.fsync(file)
    os.close(file)


def plain_read(path, memory):
    file = os.open(path, os.O_RDONLY)
    for at in range(0, len(memory), CHUNK):
        os.readv(file, [memory[at:at + CHUNK]])
    os.close(file)


def protocol_read(path, memory):
    from zero_c._core import checksum

    file, buffer = os.open(path, os.O_RDONLY), memoryview(bytearray(CHUNK))
    for take in (False, True):
        for at in range(0, len(memory), CHUNK):
            count = os.preadv(file, [buffer], at)
            if take:
                memory[at:at + count] = buffer[:count]
            else:
                checksum(buffer[:count])
    os.close(file)


def rank_main(job):
    import torch
    from workloads import WORKLOADS as MODELS

    import zero_c
    from zero_c.torch import ShardedOptimizer

    torch.set_num_threads(1)
    comm = zero_c.init(timeout=600)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank % os.cpu_count()]})
    torch.manual_seed(0)
    workload = MODELS[job["workload"]]
    model = workload.full()
    opt = ShardedOptimizer(model, optimizer="adamw", lr=1e-3, stage=job["stage"], comm=comm)
    model(*workload.batch(0, comm.rank)).backward()
    opt.step()
    folder = pathlib.Path(job["folder"])
    kept, own = folder / "kept", folder / f"plain{comm.rank}"
    peaks = {}
    for what in (opt.save, opt.load, opt.save, opt.load):  # the second of each is what is kept
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = rss("VmRSS")
        what(kept)
        peaks[what.__name__] = rss("VmHWM") - before
    total = sum(path.stat().st_size for path in kept.iterdir())
    memory = memoryview(torch.ones(total // 2, dtype=torch.uint8).numpy())

    def timed(what, *args):
        comm.barrier()
        start = time.perf_counter()
        what(*args)
        comm.barrier()
        return time.perf_counter() - start

    def cold():
        comm.barrier()
        forget([own, *(kept.iterdir() if comm.rank == 0 else ())])
        comm.barrier()

    rounds = []
    for _ in range(job["rounds"]):
        seconds = {"write": timed(plain_write, own, memory), "save": timed(opt.save, kept)}
        plain_read(own, memory), opt.load(kept)  # both are in the page cache
        seconds |= {"read warm": timed(plain_read, own, memory), "load warm": timed(opt.load, kept),
                    "protocol warm": timed(protocol_read, own, memory)}
        cold()
        seconds |= {"read cold": timed(plain_read, own, memory), "load cold": timed(opt.load, kept)}
        rounds.append(seconds)
    if comm.rank == 0:
        (folder / "result.json").write_text(json.dumps({"bytes": total, "rounds": rounds}))
    (folder / f"peaks{comm.rank}.json").write_text(json.dumps(peaks))


# ---- all of it -----------------------------------------------------------------------------------------


def measure(workload, stage, rounds, parent):
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        job = {"workload": workload, "stage": stage, "rounds": rounds, "folder": folder}
        base = {**os.environ, "BENCHMARK_JOB": json.dumps(job), "ZERO_C_WORLD_SIZE": "2", "ZERO_C_JOB": secrets.token_hex(6),
                "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([sys.executable, __file__], env={**base, "ZERO_C_RANK": str(rank)}) for rank in range(2)]
        try:
            codes = [rank.wait(1800) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"{workload}: ranks ended with {codes}")
        result = json.loads(pathlib.Path(folder, "result.json").read_text())
        peaks = [json.loads(pathlib.Path(folder, f"peaks{rank}.json").read_text()) for rank in range(2)]
        return result | {"workload": workload, "stage": stage, "peaks": {key: max(p[key] for p in peaks) for key in peaks[0]}}


def table(results):
    lines = ["| workload | stage | MB | what | MB/s plain | MB/s ours | ratio (rounds: least, most) | target |", "|---|---|---|---|---|---|---|---|"]
    for result in results:
        for ours, plain in KINDS.items():
            ratios = [seconds[plain] / seconds[ours] for seconds in result["rounds"]]
            rates = [result["bytes"] / 1e6 / statistics.median(seconds[key] for seconds in result["rounds"]) for key in (plain, ours)]
            ratio = statistics.median(ratios)
            target = "" if ours == "protocol warm" else f"{TARGET}{'' if ratio >= TARGET else ', missed'}"
            lines.append(f"| {result['workload']} | {result['stage']} | {result['bytes'] / 1e6:.0f} | {ours} | {rates[0]:.0f} | {rates[1]:.0f} | "
                         f"{ratio:.2f} ({min(ratios):.2f}, {max(ratios):.2f}) | {target} |")
    lines += ["", "| workload | stage | peak above before, save | load |", "|---|---|---|---|"]
    lines += [f"| {result['workload']} | {result['stage']} | {result['peaks']['save'] / 2**20:.2f} MiB | {result['peaks']['load'] / 2**20:.2f} MiB |"
              for result in results]
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of the small workloads: shows that it works")
    parser.add_argument("--folder", default=None, help="where checkpoints are written; by default the system's temporary folder")
    parser.add_argument("--only", default=None, help="one workload")
    parser.add_argument("--out", default=str(HERE / "results" / "checkpoint.md"))
    args = parser.parse_args()
    chosen = [(name, stage) for name, stage in WORKLOADS if args.only in (None, name) and not (args.quick and name == "flat64m")]
    load = os.getloadavg()[0]
    results = [measure(name, stage, 1 if args.quick else args.rounds, args.folder) for name, stage in chosen]
    text = "\n".join(["# Checkpoints: rates and memory", "", "How: benchmarks/checkpoint.py. Two ranks.",
                      f"{os.cpu_count()} cores; load average of the machine {load:.1f} before and {os.getloadavg()[0]:.1f} after "
                      f"(above 2 at the end: others were at work); {args.rounds} rounds.", "", *table(results), ""])
    print(text)
    if not args.quick and not args.only:
        pathlib.Path(args.out).write_text(text)


if __name__ == "__main__":
    rank_main(json.loads(os.environ["BENCHMARK_JOB"])) if "BENCHMARK_JOB" in os.environ else main()
