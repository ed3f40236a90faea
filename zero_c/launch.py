"""python -m zero_c.launch -n N script.py args...: N ranks on this host.

Every rank is the same Python with ZERO_C_* variables, and unless --no-torch-env
torchrun's, set. Signals are passed on; when one rank fails the others are ended;
the exit status is that of the first that failed (128 + signal number for a signal).
Ranks die with the launcher, whatever kills it.
"""

import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SENT_BY_KERNEL = 0x80  # si_code of a signal that a terminal sent, to every process in the foreground
PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m zero_c.launch", description="Start N ranks of a script on this host.")
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--no-torch-env", action="store_true", help="set only ZERO_C_* variables, not torchrun's")
    parser.add_argument("--timeout-grace", type=float, default=10.0, metavar="SECONDS",
                        help="from SIGTERM to SIGKILL when the ranks are ended (default 10)")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"-n is {options.ranks}; it must be 1 or more")
    if not 0 <= options.timeout_grace < float("inf"):
        parser.error(f"--timeout-grace is {options.timeout_grace}; it must be 0 or more")
    return options


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(ranks, torch_env):
    """One environment for each rank."""
    common = {"ZERO_C_WORLD_SIZE": str(ranks), "ZERO_C_JOB": f"launch {os.getpid()} {secrets.token_hex(8)}",
              "ZERO_C_TOKEN": secrets.token_hex(16)}
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if torch_env:
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        own = {"ZERO_C_RANK": str(rank), "ZERO_C_LOCAL_RANK": str(rank)}
        if torch_env:
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        yield {**os.environ, **common, **own}


def start(options, mask):
    """The ranks' processes; each dies with this one and has the signal mask this one had."""
    launcher = os.getpid()

    def prepare():
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGKILL)

    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.args]
    started = []
    try:
        for environ in environments(options.ranks, not options.no_torch_env):
            started.append(subprocess.Popen(command, env=environ, preexec_fn=prepare))
    except BaseException:
        end(started, 0)
        raise
    return started


def end(processes, grace_s):
    """SIGTERM, and SIGKILL to those that live after the grace."""
    for process in processes:
        process.terminate()
    kill_at = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, kill_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def status_of(process):
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def watch(processes, grace_s):
    """Until all have ended or one failed: the exit status. Signals that arrive are passed on."""
    kill_at = None  # set by a signal that asks the ranks to end
    while True:
        for rank, process in enumerate(processes):
            if process.poll():
                print(f"zero_c.launch: rank {rank} ended with status {status_of(process)}; ending the others", file=sys.stderr)
                end(processes, grace_s)
                return status_of(process)
        if all(process.returncode == 0 for process in processes):
            return 0
        if kill_at is not None and time.monotonic() > kill_at:
            end(processes, 0)
            return next(filter(None, map(status_of, processes)), 0)
        came = signal.sigtimedwait({signal.SIGCHLD, *FORWARDED}, 0.5)
        if came is None or came.si_signo == signal.SIGCHLD:
            continue
        if came.si_code != SENT_BY_KERNEL:
            for process in processes:
                process.send_signal(came.si_signo)
        if came.si_signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) and kill_at is None:
            kill_at = time.monotonic() + grace_s


def main(argv=None):
    options = parse(argv)
    # Signals wait until watch() takes them, so none is lost and none interrupts anything else.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})
    return watch(start(options, mask), options.timeout_grace)


if __name__ == "__main__":
    sys.exit(main())
