"""python -m zero_c.launch -n N script.py args...: N ranks on this host.

With --hosts H --host-index I --address HOST:PORT, given on every host, N ranks on each of H hosts; host 0 has the
address, with a free port (and torch the port below it). They know one another by ZERO_C_TOKEN, a secret to be set on
every host, and ZERO_C_JOB, by default the address.

Every rank is the same Python with ZERO_C_* variables, and unless --no-torch-env
torchrun's, set. Signals are passed on; when one rank fails the others are ended;
the exit status is that of the first that failed (128 + signal number for a signal).
Ranks die with the launcher, whatever kills it.

With --max-restarts K all ranks of the one host start again after a failure, at most
K times, and ZERO_C_RESTART counts from 0. Nothing of one attempt meets the next: all
its ranks have ended, what they had started and left is killed, and job, token and port
are new. A launcher that was asked to end (SIGINT, SIGTERM, SIGHUP) starts nothing again.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

from zero_c._address import parse_address

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
SENT_BY_KERNEL = 0x80  # si_code of a signal that a terminal sent, to every process in the foreground
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m zero_c.launch", description="Start N ranks of a script on this host.")
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--hosts", type=int, default=1, help="number of hosts, each with N ranks (default 1)")
    parser.add_argument("--host-index", type=int, default=0, metavar="I", help="this host's number, from 0")
    parser.add_argument("--address", metavar="HOST:PORT", help="with several hosts: of host 0, with a free port there")
    parser.add_argument("--no-torch-env", action="store_true", help="set only ZERO_C_* variables, not torchrun's")
    parser.add_argument("--timeout-grace", type=float, default=10.0, metavar="SECONDS",
                        help="from SIGTERM to SIGKILL when the ranks are ended (default 10)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K",
                        help="when a rank fails start all again, at most K times (default 0); on one host")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"-n is {options.ranks}; it must be 1 or more")
    if not 0 <= options.timeout_grace < float("inf"):
        parser.error(f"--timeout-grace is {options.timeout_grace}; it must be 0 or more")
    if options.hosts < 1 or not 0 <= options.host_index < options.hosts:
        parser.error(f"--hosts is {options.hosts} and --host-index {options.host_index}; legal are 1 host or more, and an index "
                     f"from 0, below --hosts")
    if options.max_restarts < 0:
        parser.error(f"--max-restarts is {options.max_restarts}; it must be 0 or more")
    if options.hosts > 1:
        check_hosts(parser, options)
    return options


def check_hosts(parser, options):
    """What ranks on several hosts must have in common cannot be made up here."""
    if options.max_restarts:
        parser.error(f"--max-restarts is {options.max_restarts} and --hosts {options.hosts}; the launchers of several hosts do not "
                     f"know of one another, and ranks that start again on one of them would meet nobody, or ranks of the attempt "
                     f"before: use torchrun --nnodes --max-restarts, or start all hosts again")
    if options.address is None:
        parser.error("--hosts without --address; give host 0's address and a free port there, the same on all hosts")
    try:
        options.address = parse_address(options.address, "--address")
    except ValueError as error:
        parser.error(str(error))
    if options.address.port == 1:
        parser.error("--address has port 1; torch uses the port below it: legal are 2 to 65535")
    if not os.environ.get("ZERO_C_TOKEN"):
        parser.error("ranks on several hosts meet over the network, where others may come: set ZERO_C_TOKEN to the same secret "
                     "on all hosts, for example to what this printed on one of them: "
                     "python -c 'import secrets; print(secrets.token_hex(16))'")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meeting(options):
    """What the ranks have in common, in variables of zero_c; MASTER_ADDR and MASTER_PORT for torch."""
    if options.hosts > 1:
        address = options.address
        return {"ZERO_C_ADDR": str(address), "ZERO_C_JOB": os.environ.get("ZERO_C_JOB") or f"launch {address}",
                "ZERO_C_TOKEN": os.environ["ZERO_C_TOKEN"]}, (address.host, address.port - 1)
    return {"ZERO_C_JOB": f"launch {os.getpid()} {secrets.token_hex(8)}",
            "ZERO_C_TOKEN": secrets.token_hex(16)}, ("127.0.0.1", free_port())


def environments(options, restart):
    """One environment for each rank on this host; for each attempt they have a job, a token and a port of their own."""
    local, size = options.ranks, options.hosts * options.ranks
    common, (master, port) = meeting(options)
    common["ZERO_C_RESTART"] = str(restart)
    counts = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // local))
    if not options.no_torch_env:
        common |= {"MASTER_ADDR": master, "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(restart)}
    for local_rank in range(local):
        place = {"RANK": str(options.host_index * local + local_rank), "LOCAL_RANK": str(local_rank), **counts}
        own = {f"ZERO_C_{name}": value for name, value in place.items()}
        yield {**os.environ, **common, **own, **({} if options.no_torch_env else place)}


def start(options, restart, mask):
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
        for environ in environments(options, restart):
            started.append(subprocess.Popen(command, env=environ, preexec_fn=prepare))
    except (OSError, subprocess.SubprocessError) as error:
        end(started, 0)
        sys.exit(f"zero_c.launch: rank {options.host_index * options.ranks + len(started)} cannot be started: {error}")
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


def say(words):
    """A line to the standard error, in one piece: ranks write there too. print() writes the line's end by itself where Python
    is unbuffered, and a rank's words may come between.
    """
    sys.stderr.write(f"zero_c.launch: {words}\n")
    sys.stderr.flush()


def status_of(process):
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def watch(processes, first_rank, grace_s, then):
    """Until all have ended or one failed: the exit status, and whether a signal had asked for the end.

    Signals that arrive are passed on. `then`: what follows when a rank failed, for the message.
    """
    kill_at = None  # set by a signal that asks the ranks to end
    while True:
        failed = [process for process in processes if process.poll()]
        if failed:
            # One that a signal ended comes first: others may have lost it, and raised.
            first = min(failed, key=lambda process: process.returncode > 0)
            say(f"rank {first_rank + processes.index(first)} ended with status {status_of(first)}; "
                f"ending the others{then if kill_at is None else ''}")
            end(processes, grace_s)
            return status_of(first), kill_at is not None
        if all(process.returncode == 0 for process in processes):
            return 0, kill_at is not None
        if kill_at is not None and time.monotonic() > kill_at:
            end(processes, 0)
            return next(filter(None, map(status_of, processes)), 0), True
        came = signal.sigtimedwait({signal.SIGCHLD, *FORWARDED}, 0.5)
        if came is None or came.si_signo == signal.SIGCHLD:
            continue
        if came.si_code != SENT_BY_KERNEL:
            for process in processes:
                process.send_signal(came.si_signo)
        if came.si_signo in ENDING and kill_at is None:
            kill_at = time.monotonic() + grace_s


# ---- again -----------------------------------------------------------------


def ending_signal():
    """One that came while ranks were ended, or None. SIGUSR1 and SIGUSR2 were for those ranks, and go with them."""
    found = None
    while came := signal.sigtimedwait(FORWARDED, 0):
        if came.si_signo in ENDING:
            found = found or signal.Signals(came.si_signo)
    return found


def children():
    """Processes whose parent is this one."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
            if int(stat.read().rsplit(b")", 1)[1].split()[1]) == os.getpid():
                found.add(int(entry))
    return found


def end_orphans(own):
    """Kills what ranks had started and left: it may hold a checkpoint's lock, a port, a GPU's memory.

    This process is the parent of such now, and when one ends, of its children. `own`: children that were never a rank's.
    """
    while orphans := children() - own:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(options, mask):
    """All attempts; the exit status of the last."""
    if options.max_restarts:
        own = children()  # of whoever this process was before it became the launcher
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for restart in range(options.max_restarts + 1):
        again = restart < options.max_restarts
        then = f", then restart {restart + 1} of {options.max_restarts}" if again else ""
        processes = start(options, restart, mask)
        status, asked = watch(processes, options.host_index * options.ranks, options.timeout_grace, then)
        if status == 0 or asked or not again:
            break
        if number := ending_signal():
            say(f"{number.name} came; no restart")
            break
        end_orphans(own)
    return status


def main(argv=None):
    options = parse(argv)
    # Signals wait until watch() or ending_signal() takes them, so none is lost and none interrupts anything else.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})
    return run(options, mask)


if __name__ == "__main__":
    sys.exit(main())
