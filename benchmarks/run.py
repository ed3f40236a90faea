"""Measures data-parallel trainers against one another on this machine, in one interleaved run:

    python benchmarks/run.py [--quick]

README.md beside this file says how, and what the figures can carry.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata

import native
import report
from peers import DEFAULT, PEERS, TOO_SLOW

HERE = pathlib.Path(__file__).resolve().parent
WORKLOADS = ["flat64m", "many_small", "gpt"]
BF16_PEERS = ["zero_c_0", "zero_c_1", "zero_c_2", "zero_c_3", "zero_c_2_shared"]
MALLOC = {
    "default": {},
    "keep": {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)},
}


def describe_machine():
    def first(path, key):
        with open(path) as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith(key)), "unknown")

    def version(package):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    def commit():
        try:
            return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True,
                                  check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git, or no repository
            return "unknown"

    return dict(
        commit=commit(), cpu=first("/proc/cpuinfo", "model name"), cores=len(os.sched_getaffinity(0)),
        memory_gib=round(int(first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        kernel=platform.release(), libc=" ".join(platform.libc_ver()), python=platform.python_version(),
        huge_pages=pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
        if os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled") else "unknown",
        torch=version("torch"), numpy=version("numpy"), zero_c=version("zero_c"))


def shm_bytes():
    """What the files in /dev/shm take."""
    total = 0
    for path in pathlib.Path("/dev/shm").rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            pass
    return total


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def measure(ranks, cores, timeout, environment, **job):
    """One job in `ranks` fresh processes: dict(ranks=[...], shm_left=bytes), or dict(error=text)."""
    before = shm_bytes()
    with tempfile.TemporaryDirectory() as folder:
        job.update(result=os.path.join(folder, "result"), cores=[sorted(c) for c in cores])
        shared = dict(os.environ, **environment, BENCHMARK_JOB=json.dumps(job), WORLD_SIZE=str(ranks),
                      LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                      GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        processes, logs = [], []
        for rank in range(ranks):
            logs.append(open(os.path.join(folder, f"log.{rank}"), "w+"))
            processes.append(subprocess.Popen([sys.executable, str(HERE / "worker.py")], stdout=logs[-1],
                                              stderr=logs[-1], start_new_session=True,
                                              env=dict(shared, RANK=str(rank), LOCAL_RANK=str(rank))))
        deadline = time.monotonic() + timeout
        try:
            while any(p.poll() is None for p in processes):
                if time.monotonic() > deadline or any(p.poll() for p in processes):
                    break
                time.sleep(0.05)
        finally:
            late = time.monotonic() > deadline
            if any(p.poll() is None for p in processes):
                time.sleep(0 if late else 1)    # a rank whose peer failed may still say why
            for p in processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()
        if any(p.returncode for p in processes):
            texts = [f"no result within {timeout:.0f} s"] if late else []
            for rank, (p, log) in enumerate(zip(processes, logs)):
                log.seek(0)
                texts.append(f"rank {rank}, status {p.returncode}: {' | '.join(log.read().splitlines()[-3:])}")
            return dict(error="; ".join(texts))
        results = []
        for rank in range(ranks):
            with open(f"{job['result']}.{rank}") as f:
                results.append(json.load(f))
    return dict(ranks=results, shm_left=shm_bytes() - before)


def training(args, cores, data, save):
    """Rounds of all peers of a workload in turn, so that what the machine does meets all of them."""
    plan = [(w, [p for p in args.peers if (p in BF16_PEERS if w.endswith("bf16") else p not in TOO_SLOW.get(w, ()))],
             args.rounds) for w in args.workloads]
    if args.bf16:
        plan.append(("flat64m_bf16", [p for p in BF16_PEERS if p in args.peers], 1))
    for workload, peers, rounds in plan:
        for turn in range(rounds):
            for peer in peers:
                begin = time.monotonic()
                outcome = measure(2, cores, args.timeout, MALLOC[args.malloc], kind="train", workload=workload,
                                  peer=peer, warm_up=args.warm_up, steps=args.steps, memory=turn == 0)
                data["runs"].append(dict(workload=workload, peer=peer, round=turn, **outcome))
                note = outcome.get("error") or "%.1f ms" % (1e3 * statistics.median(report.step_times(outcome)))
                print(f"{workload:12} round {turn}  {peer:16} {note}  ({time.monotonic() - begin:.0f} s)", flush=True)
                save()


def native_parts(args, cores, data, save):
    allowed = set().union(*cores)
    with tempfile.TemporaryDirectory() as folder:
        programs = native.build(pathlib.Path(folder))
        for program, argument in (("kernel_rates", 3 if args.quick else 9), ("engine_parts", 3 if args.quick else 9),
                                  ("barrier_time", 2000 if args.quick else 50000)):
            data["native"][program] = native.run(programs, program, argument, allowed, args.timeout)
            print(program, data["native"][program], flush=True)
            save()
    for ranks in (2, 8):
        where = cores if ranks == 2 else [allowed] * ranks
        outcome = measure(ranks, where, args.timeout, {}, kind="barrier", loops=2000 if ranks == 2 else 200)
        data["native"][f"python_barrier_{ranks}"] = outcome.get("error") or max(
            statistics.median(r["times"]) for r in outcome["ranks"])
        print("barrier through Python,", ranks, "ranks:", data["native"][f"python_barrier_{ranks}"], flush=True)
    save()


def main():
    listed = lambda text: text.split(",")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--workloads", type=listed, default=WORKLOADS, help=",".join(WORKLOADS))
    parser.add_argument("--peers", type=listed, default=DEFAULT,
                        help=f"of {','.join(PEERS)} (default: {','.join(DEFAULT)})")
    parser.add_argument("--malloc", choices=MALLOC, default="default",
                        help="glibc's allocator for all peers alike: as it is, or told to keep memory")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one pair of processes")
    parser.add_argument("--no-native", dest="native", action="store_false", help="leave out the C benchmarks")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="leave out the memory of a bf16 model")
    parser.add_argument("--quick", action="store_true", help="one round of two steps: shows that everything works")
    parser.add_argument("--name", default="latest", help="results/NAME.json and results/NAME.md")
    args = parser.parse_args()
    for given, known in ((args.peers, PEERS), (args.workloads, WORKLOADS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{', '.join(unknown)}: known are {', '.join(known)}")
    if args.quick:
        args.rounds, args.steps, args.warm_up = 1, 2, 1
    cores = [{c} for c in sorted(os.sched_getaffinity(0))[:2]]
    if len(cores) < 2:
        sys.exit(f"the benchmark runs two ranks on two cores, and this process may use {len(cores)}")

    data = dict(machine=describe_machine(), began=datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
                settings=dict(rounds=args.rounds, steps=args.steps, warm_up=args.warm_up, malloc=args.malloc),
                runs=[], native={})
    out = HERE / "results" / f"{args.name}.json"
    out.parent.mkdir(exist_ok=True)

    def save():
        out.write_text(json.dumps(data, indent=0))
        out.with_suffix(".md").write_text(report.markdown(data))

    if args.native:
        native_parts(args, cores, data, save)
    training(args, cores, data, save)
    save()
    print("\n" + report.markdown(data))
    print(f"written to {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
