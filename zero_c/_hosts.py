"""How ranks on several hosts find one another, before the C core takes their sockets.

Rank 0 listens at an address that all ranks know, the others connect, again and again until it is there; what they
say then is in _handshake.py.

Rank 0 refuses who does not belong here and goes on waiting for the right ones. It never waits for one connection: all
are polled by one loop, each has a deadline to say hello, and only so many may be open. It stops listening before it
answers, so a rank that is quick to begin the job's next meeting cannot find this one.
"""

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import time

from zero_c import _handshake
from zero_c._core import CommError, Timeout
from zero_c._handshake import Job, Refused, Wrong

HELLO_S = 5.0      # for a connection to be made, and for one to say its first word
FAREWELL_S = 1.0   # for rank 0 to say who is missing to a rank that gives up
RETRY_S = 0.2
GREETING_S = 1.0   # for who has the port to say that it is a rank 0
PORT_BUSY_S = 3.0  # how long the port may still belong to a connection that is going away
GUESTS_MAX = 128   # connections that have not said who they are
ACCEPTS = 32       # of them in one turn of the loop
BACKLOG = 512
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def meet(rank, ranks, address, name, token, start_timeout_s):
    """Connects the two or more ranks of the job `name`; blocking. Numbers of all ranks' hosts; and for rank 0 a socket to each rank
    (None to itself), for others one to rank 0.
    """
    job = Job(rank, ranks, address, name, token, start_timeout_s)
    if rank > 0:
        return _join(job)
    with contextlib.closing(_Listener(job)) as listener:
        return listener.meet()


def _hand_over(sock):
    """As the core wants a socket."""
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _why(error):
    """What an OSError, or a Wrong, means; without its number."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error)


# ---- rank 0 --------------------------------------------------------------


class _Guest:
    """A connection to rank 0."""

    def __init__(self, sock):
        self.sock, self.nonce, self.data = sock, _handshake.new_nonce(), bytearray()
        self.give_up = time.monotonic() + HELLO_S
        self.said = None  # its hello, once it was taken in


class _Listener:
    def __init__(self, job):
        self.job = job
        self.joined = {}   # rank -> _Guest
        self.guests = {}   # _Guest -> None: those who have not said who they are, the oldest first
        self.went = set()  # ranks that had joined once
        self.refused = ""  # the last sentence
        self.listening = []
        self.selector = selectors.DefaultSelector()

    def close(self):
        self._stop_listening()
        for guest in (*self.guests, *self.joined.values()):
            guest.sock.close()
        self.selector.close()

    def meet(self):
        self._listen()
        while len(self.joined) < self.job.ranks - 1:
            if self.job.left_s() <= 0:
                self._give_up()
            self._turn()
        self._stop_listening()
        return self._answer()

    def _listen(self):
        """Listens on what the address names on this host, and nowhere else."""
        busy_until = min(time.monotonic() + PORT_BUSY_S, self.job.give_up)
        while not self.listening:
            try:
                self.listening = _listen_at(self.job.address)
            except OSError as error:
                # Names may not be known yet; a port that another program has will not become free.
                until = {errno.EADDRINUSE: busy_until, errno.EADDRNOTAVAIL: 0}.get(error.errno, self.job.give_up)
                if time.monotonic() >= until:
                    raise self._cannot_listen(error) from None
                time.sleep(RETRY_S)
        for sock in self.listening:
            self.selector.register(sock, selectors.EVENT_READ)

    def _cannot_listen(self, error):
        advice = "it must be an address of the host of rank 0, the same on all ranks"
        if error.errno == errno.EADDRINUSE:
            advice = (f"{_who_listens(self.job.address)} has that port: choose a free one with ZERO_C_ADDR=host:port, or another "
                      f"MASTER_PORT")
        return CommError(f"rank 0 of job '{self.job.name}' cannot listen at {self.job.address} ({_why(error)}); {advice}")

    def _stop_listening(self):
        for sock in self.listening:
            sock.close()
        self.listening = []

    def _turn(self):
        """Waits until something happens, and deals with it."""
        ends = [self.job.give_up, *(guest.give_up for guest in list(self.guests)[:1])]
        ready = self.selector.select(max(0.0, min(ends) - time.monotonic()))
        for key, _ in ready:
            if key.data is not None:  # those who are here come before those who knock
                self._hear(key.data)
        for key, _ in ready:
            if key.data is None:
                self._accept(key.fileobj)
        now = time.monotonic()
        for guest in [guest for guest in self.guests if guest.give_up <= now]:
            self._drop(guest)

    def _accept(self, listening):
        for _ in range(ACCEPTS):
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if error.errno in FULL:
                    self.refused = f"a connection, for want of room ({error.strerror}; see ulimit -n)"
                    self._make_room(1)
                    time.sleep(RETRY_S)  # the guest stays in the queue: no busy loop over it
                return
            self._make_room(GUESTS_MAX)
            sock.setblocking(False)
            guest = _Guest(sock)
            self.guests[guest] = None
            self.selector.register(sock, selectors.EVENT_READ, guest)
            _say(guest, _handshake.greeting(guest.nonce))

    def _make_room(self, limit):
        if len(self.guests) >= limit:
            self._drop(next(iter(self.guests)))

    def _drop(self, guest):
        self.selector.unregister(guest.sock)
        guest.sock.close()
        if guest.said is None:
            del self.guests[guest]
        else:
            del self.joined[guest.said["rank"]]
            self.went.add(guest.said["rank"])

    def _hear(self, guest):
        try:
            data = guest.sock.recv(_handshake.HEAD.size + _handshake.HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or guest.said is not None:
            # A rank that has joined has nothing to say. It ends its side when it gives up, and may come again.
            if guest.said is not None:
                self._tell_missing(guest)
            self._drop(guest)
            return
        guest.data += data
        try:
            self._read(guest)
        except Wrong:
            self._drop(guest)
        except Refused as refused:
            self.refused, nonce = refused.args
            _say(guest, _handshake.answer(self.job, nonce, refused=self.refused))
            self._drop(guest)

    def _read(self, guest):
        """Takes the guest in when its hello is whole and right."""
        size = _handshake.HEAD.size
        if not guest.data.startswith(_handshake.MAGIC[:len(guest.data)]):
            raise Wrong("no hello")
        if len(guest.data) < size:
            return
        length, proof = _handshake.head(guest.data[:size], _handshake.HELLO_BYTES)
        if len(guest.data) > size + length:
            raise Wrong("more than a hello")
        if len(guest.data) == size + length:
            said = _handshake.read_hello(self.job, guest.nonce, bytes(guest.data[size:]), proof, self.joined)
            del self.guests[guest]
            guest.said = said
            self.joined[said["rank"]] = guest

    def _give_up(self):
        for guest in self.joined.values():
            self._tell_missing(guest)
        raise Timeout(f"job '{self.job.name}': {self._missing()}")

    def _tell_missing(self, guest):
        sentence = self._missing()[:_handshake.SENTENCE_CHARACTERS]
        _say(guest, _handshake.answer(self.job, guest.said["nonce"], refused=sentence, late=True))

    def _missing(self):
        """Who has not come yet, in words."""
        job = self.job
        absent = set(range(1, job.ranks)) - self.joined.keys()
        sentence = f"{len(absent)} of {job.ranks} ranks are not at {job.address} after {job.start_timeout_s - job.left_s():.1f} s"
        for what, ranks in (("missing", absent - self.went), ("came and went", absent & self.went)):
            if ranks:
                sentence += f"; {what}: {', '.join(map(str, sorted(ranks)))}"
        own = [sock.getsockname()[0].partition("%")[0] for sock in self.listening]
        if all(ipaddress.ip_address(number).is_loopback for number in own):
            sentence += f"; rank 0 listens at {own[0]}, which ranks on other hosts cannot reach: give its address on the network"
        if self.refused:
            sentence += f"; refused was: {self.refused}"
        return sentence

    def _answer(self):
        """Tells all ranks of all hosts. Who is gone meanwhile will be missed by the core."""
        order = [self.joined[rank] for rank in range(1, self.job.ranks)]
        hosts = _numbers([_handshake.own_host(), *(guest.said["host"] for guest in order)])
        for guest in order:
            guest.sock.settimeout(HELLO_S)
            with contextlib.suppress(OSError):
                guest.sock.sendall(_handshake.answer(self.job, guest.said["nonce"], hosts=hosts))
        self.joined = {}
        return hosts, [None, *(_hand_over(guest.sock) for guest in order)]


def _say(guest, frame):
    """Sends what is short to one that was silent so far: that never waits."""
    with contextlib.suppress(OSError):  # who is gone will be found gone
        guest.sock.send(frame)


def _numbers(names):
    """Names as numbers from 0, in the order in which they appear."""
    seen = {}
    return [seen.setdefault(name, len(seen)) for name in names]


def _who_listens(address):
    """Who has a port, in words: a rank 0 greets all who connect."""
    try:
        with socket.create_connection((address.host, address.port), GREETING_S) as sock:
            text, _ = _receive(sock, _handshake.HELLO_BYTES, time.monotonic() + GREETING_S)
        _handshake.read_greeting(text)
        return "rank 0 of another job"
    except (OSError, Wrong):
        return "another program"


def _listen_at(address):
    """Sockets that listen: one for each of the address's numbers that this host has."""
    sockets, failure = [], None
    try:
        for family, kind, protocol, _, place in dict.fromkeys(socket.getaddrinfo(address.host, address.port,
                                                                                 type=socket.SOCK_STREAM)):
            try:
                sockets.append(_listening(socket.socket(family, kind, protocol), place))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                failure = error  # a number of another host, or of a protocol that is not here
        if not sockets:
            raise failure
        return sockets
    except BaseException:
        for sock in sockets:
            sock.close()
        raise


def _listening(sock, place):
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


# ---- the other ranks -----------------------------------------------------


def _join(job):
    reason = "it was not tried"
    while job.left_s() > 0:
        try:
            return _call(job)
        except (OSError, Wrong) as error:
            reason = _why(error)
        time.sleep(max(0.0, min(RETRY_S, job.left_s())))
    raise Timeout(f"rank {job.rank}: rank 0 of job '{job.name}' was not met at {job.address} within {job.start_timeout_s:.1f} s "
                  f"({reason}); missing: 0")


def _call(job):
    """One attempt; OSError or Wrong: there may be another."""
    sock = socket.create_connection((job.address.host, job.address.port), min(HELLO_S, max(0.01, job.left_s())))
    try:
        if sock.getsockname() == sock.getpeername():  # TCP connects a port that nobody listens at with itself
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves rank 0 the port
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        nonce = _handshake.new_nonce()
        text, _ = _receive(sock, _handshake.HELLO_BYTES, min(time.monotonic() + HELLO_S, job.give_up))
        sock.sendall(_handshake.hello(job, nonce, _handshake.read_greeting(text)))
        return _wait_for_all(sock, job, nonce), [_hand_over(sock)]
    except BaseException:
        sock.close()
        raise


def _wait_for_all(sock, job, nonce):
    """The numbers of their hosts, when all ranks have come."""
    limit_bytes = _handshake.HELLO_BYTES + _handshake.ANSWER_BYTES_PER_RANK * job.ranks
    gave_up = not _speaks(sock, job.left_s())
    try:
        if gave_up:
            sock.shutdown(socket.SHUT_WR)  # rank 0, which may have begun later, tells who is missing
        hosts = _handshake.read_answer(job, nonce, *_receive(sock, limit_bytes, time.monotonic() + FAREWELL_S))
        if not gave_up:
            return hosts
        why = "the last came at that moment"
    except (OSError, Wrong) as error:
        if not gave_up:
            raise
        why = _why(error)
    except Refused as refused:
        sentence, late = refused.args
        raise (Timeout if late else CommError)(
            f"rank {job.rank} of job '{job.name}', answer from {job.address}: {sentence}") from None
    raise Timeout(f"rank {job.rank}: job '{job.name}' did not start within {job.start_timeout_s:.1f} s; rank 0 at {job.address} "
                  f"did not say who is missing ({why})")


def _speaks(sock, seconds):
    """Waits for the other side to say something, or to end the connection."""
    sock.settimeout(max(0.01, seconds))
    try:
        sock.recv(1, socket.MSG_PEEK)
        return True
    except TimeoutError:
        return False


def _receive(sock, limit_bytes, give_up):
    """Text and proof of one frame, and not a byte more: what follows is the core's."""
    length, proof = _handshake.head(_receive_bytes(sock, _handshake.HEAD.size, give_up), limit_bytes)
    return _receive_bytes(sock, length, give_up), proof


def _receive_bytes(sock, count, give_up):
    data = b""
    while len(data) < count:
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "it ended the connection")
        data += part
    return data
