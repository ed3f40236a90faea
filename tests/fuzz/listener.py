"""The place where ranks on several hosts meet (zero_c._hosts), with strangers there.

An input is what strangers do at rank 0's port, or what a rank 0 that is none says to a rank: bytes, frames that are
right but for something, in pieces, and ends of connections. At rank 0's port the right rank comes afterwards.

    rank 0 and rank 1 meet, whatever the strangers did, unless one of them knew the token and took a rank's place
    a rank that is told nonsense tries again, or raises CommError or Timeout with a sentence
    no descriptor is left
"""

import os
import socket
import threading
import time

import zero_c
from choices import Choices
from handshake import ANSWERS, GREETING, HELLO, check_sentence, text_of
from zero_c import _handshake, _hosts
from zero_c._address import Address
from zero_c._handshake import HEAD, MAGIC, Job, Wrong

RANKS, NAME, TOKEN = 2, "job", "token"
DEADLINE_S = 5.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def frame(choices, right, job, kind, nonce):
    text = text_of(choices, right)
    proof = job.proof(kind, nonce, text) if choices.below(4) else bytes(32)
    data = bytearray(HEAD.pack(MAGIC, len(text) if choices.below(8) else choices.below(65536), proof) + text)
    if choices.below(8) == 0:
        data[choices.below(len(data))] = choices.byte()
    return bytes(data[:choices.below(len(data))] if choices.below(8) == 0 else data)


# ---- at rank 0's port ------------------------------------------------------


def met(rank, address, outcomes, timeout_s):
    try:
        outcomes[rank] = _hosts.meet(rank, RANKS, address, NAME, TOKEN, timeout_s)
    except zero_c.Error as error:
        outcomes[rank] = error


def knock(address, zero):
    while True:
        try:
            return socket.create_connection((address.host, address.port), DEADLINE_S)
        except ConnectionRefusedError:  # it does not listen yet, or has met a stranger who knew the token
            if not zero.is_alive():
                raise
            time.sleep(0.001)


def heard_nonce(sock):
    text, _ = _hosts._receive(sock, _handshake.HELLO_BYTES, time.monotonic() + DEADLINE_S)
    return _handshake.read_greeting(text)


def at_rank_0(choices):
    address, outcomes, strangers = Address("127.0.0.1", free_port()), {}, []
    job = Job(1, RANKS, address, NAME, TOKEN if choices.below(8) == 0 else "a guess", 60)
    zero = threading.Thread(target=met, args=(0, address, outcomes, DEADLINE_S))
    zero.start()
    right = {**HELLO, "ranks": RANKS, "job": job.digest}
    for _ in range(choices.below(6)):
        if not zero.is_alive():
            break
        try:
            sock = knock(address, zero)
            strangers.append(sock)
            nonce = heard_nonce(sock) if choices.below(4) else "0" * 32
            for _ in range(choices.below(4)):
                sock.sendall(choices.bytes(100) if choices.below(4) == 0 else frame(choices, right, job, b"hello", nonce))
            if choices.below(4) == 0:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # rank 0 has ended the connection, or has met its ranks
    guessed = job.key != Job(1, RANKS, address, NAME, TOKEN, 60).key
    if not guessed:
        for sock in strangers:
            sock.close()
    if zero.is_alive():
        met(1, address, outcomes, DEADLINE_S if guessed else 0.3)
    zero.join()
    for sock in strangers:
        sock.close()
    for outcome in outcomes.values():
        if isinstance(outcome, zero_c.Error):
            assert not guessed, outcome
            check_text(outcome)
        else:
            for sock in outcome[1]:
                if sock is not None:
                    sock.close()
    assert not guessed or len(outcomes) == RANKS, outcomes


def check_text(error):
    assert type(error) in (zero_c.CommError, zero_c.Timeout), repr(error)
    assert str(error).isprintable() and len(str(error)) < 2000, error


# ---- a rank 0 that is none ---------------------------------------------------


def at_a_rank(choices):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        job = Job(1, RANKS, address, NAME, TOKEN, 60)
        server.settimeout(DEADLINE_S)

        def say():
            sock, _ = server.accept()
            with sock:
                try:
                    sock.sendall(choices.bytes(60) if choices.below(8) == 0 else frame(choices, GREETING, job, b"", ""))
                    sock.settimeout(0.05)  # a rank that was told nonsense says nothing
                    nonce = said_nonce(sock)
                    for _ in range(choices.below(3)):
                        sock.sendall(frame(choices, choices.pick(ANSWERS), job, b"answer", nonce))
                except (OSError, Wrong):
                    pass

        speaker = threading.Thread(target=say)
        speaker.start()
        try:
            hosts, (sock,) = _hosts._call(job)
            sock.close()
            assert len(hosts) == RANKS and all(0 <= host < RANKS for host in hosts), hosts
        except Wrong as wrong:
            check_sentence(str(wrong))
        except OSError:
            pass
        except zero_c.Error as error:
            check_text(error)
        finally:
            speaker.join()


def said_nonce(sock):
    data = sock.recv(HEAD.size + _handshake.HELLO_BYTES)
    return _handshake._content(data[HEAD.size:], nonce=str)["nonce"]


def one_input(data):
    before = len(os.listdir("/proc/self/fd"))
    choices = Choices(data)
    choices.pick([at_rank_0, at_a_rank])(choices)
    assert len(os.listdir("/proc/self/fd")) == before
