"""What ranks on several hosts say to one another when they meet, and whom they believe.

Messages are frames: magic, length, a proof of 32 bytes, and JSON of limited size.

    rank 0 -> rank q   greeting: protocol, version, a nonce
    rank q -> rank 0   hello: protocol, version, job, rank, number of ranks, its host, a nonce
    rank 0 -> rank q   answer: the hosts of all ranks, when all have come; or refused, with a sentence

A proof is an HMAC-SHA256 over the other side's nonce and the frame's text, so neither side believes what another
job says, or repeats. Its key is made of ZERO_C_TOKEN and the job's name; without a token this keeps jobs apart, and
strangers out only as far as they do not know the name. What follows the meeting is neither encrypted nor signed.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import time

from zero_c._version import VERSION

PROTOCOL = 1
HEAD = struct.Struct(">4sI32s")
MAGIC = b"zc\0\1"
HELLO_BYTES = 1024           # longest text of a greeting or a hello
ANSWER_BYTES_PER_RANK = 16   # an answer may be longer by this
SENTENCE_CHARACTERS = 600


class Wrong(Exception):
    """The other side does not speak this protocol."""


class Refused(Exception):
    """The other side cannot be one of this job, and is told why."""


class Job:
    """What a rank knows of its job."""

    def __init__(self, rank, ranks, address, name, token, start_timeout_s):
        self.rank, self.ranks, self.address, self.name, self.start_timeout_s = rank, ranks, address, name, start_timeout_s
        self.key = hmac.digest(os.fsencode(token or ""), b"zero_c " + name.encode(), "sha256")
        self.digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        self.give_up = time.monotonic() + start_timeout_s

    def left_s(self):
        return self.give_up - time.monotonic()

    def proof(self, kind, nonce, text):
        return hmac.digest(self.key, b"%s %s %s" % (kind, nonce.encode(), text), "sha256")


def own_host():
    """What ranks on this host have in common and others do not: ZERO_C_HOST, or the kernel's boot and the host's name."""
    name = os.environ.get("ZERO_C_HOST")
    if not name:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            name = f"{boot.read().strip()} {socket.gethostname()}"
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


# ---- frames --------------------------------------------------------------


def new_nonce():
    return secrets.token_hex(16)


def _frame(content, prove=None):
    text = json.dumps(content, separators=(",", ":")).encode()
    return HEAD.pack(MAGIC, len(text), prove(text) if prove else b"") + text


def greeting(nonce):
    return _frame({"protocol": PROTOCOL, "version": VERSION, "nonce": nonce})


def hello(job, nonce, their_nonce):
    content = {"protocol": PROTOCOL, "version": VERSION, "job": job.digest, "ranks": job.ranks, "rank": job.rank,
               "host": own_host(), "nonce": nonce}
    return _frame(content, lambda text: job.proof(b"hello", their_nonce, text))


def answer(job, their_nonce, **content):
    return _frame(content, lambda text: job.proof(b"answer", their_nonce, text))


def head(data, limit_bytes):
    """Of the first HEAD.size bytes of a frame: length of the text, and the proof."""
    magic, length, proof = HEAD.unpack(data)
    if magic != MAGIC or length > limit_bytes:
        raise Wrong("what listens there does not speak zero_c's protocol")
    return length, proof


def _content(text, **kinds):
    """The JSON object of a text, which must have members of these types."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise Wrong("a message is not JSON") from None
    if not isinstance(content, dict) or any(type(content.get(name)) is not kind for name, kind in kinds.items()):
        raise Wrong(f"a message lacks {', '.join(kinds)}")
    if "nonce" in kinds and not re.fullmatch("[0-9a-f]{32}", content["nonce"]):
        raise Wrong("a nonce is none")
    return content


def read_greeting(text):
    """The nonce of rank 0."""
    return _content(text, nonce=str)["nonce"]


def read_hello(job, nonce, text, proof, joined):
    """A rank's hello, if it may join; `joined` are those who have."""
    said = _content(text, protocol=int, version=str, job=str, ranks=int, rank=int, host=str, nonce=str)
    why = _why_not(job, said, hmac.compare_digest(proof, job.proof(b"hello", nonce, text)), joined)
    if why:
        raise Refused(printable(why), said["nonce"])
    return said


def _why_not(job, said, proven, joined):
    """Why rank 0 refuses a rank; None: it does not."""
    rank = said["rank"]
    if said["protocol"] != PROTOCOL or said["version"] != VERSION:
        return (f"rank 0 has zero_c {VERSION} (protocol {PROTOCOL}), this rank {said['version']} (protocol {said['protocol']}); "
                f"install the same on all hosts")
    if said["job"] != job.digest:
        return (f"rank {rank} is of another job than the ranks that meet here; set the same ZERO_C_JOB on all ranks of a job, "
                f"and for each job another ZERO_C_ADDR or MASTER_PORT")
    if not proven:
        return ("rank 0 has another token; ZERO_C_TOKEN must be the same on all ranks of a job, and a second job needs another "
                "ZERO_C_ADDR or MASTER_PORT")
    if said["ranks"] != job.ranks:
        return f"rank 0 expects {job.ranks} ranks, rank {rank} {said['ranks']}; the world size must be the same on all ranks"
    if not 0 < rank < job.ranks:
        return f"rank {rank} cannot join; ranks 1 to {job.ranks - 1} are expected"
    if rank in joined:
        return (f"rank {rank} has joined already; two processes have the same rank, or two jobs the same name (set ZERO_C_JOB "
                f"or another MASTER_PORT)")
    return None


def read_answer(job, nonce, text, proof):
    """The numbers of all ranks' hosts. Refused has rank 0's sentence, and whether it is that ranks are missing."""
    said = _content(text)
    if "refused" in said:
        why = said["refused"]
        if not isinstance(why, str) or not why:
            raise Wrong("a refusal lacks its reason")
        raise Refused(printable(why), said.get("late") is True)
    if not hmac.compare_digest(proof, job.proof(b"answer", nonce, text)):
        raise Refused("what listens there does not know the token of this job; ZERO_C_TOKEN must be the same on all ranks, and "
                      "the address that of rank 0", False)
    hosts = said.get("hosts")
    if not isinstance(hosts, list) or len(hosts) != job.ranks or not all(type(host) is int and 0 <= host < job.ranks
                                                                         for host in hosts):
        raise Wrong("an answer lacks the hosts")
    return hosts


def printable(text):
    """Text that came from somebody else, for a message."""
    return "".join(each if each.isprintable() else "?" for each in text[:SENTENCE_CHARACTERS])
