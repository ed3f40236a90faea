"""How ranks on several hosts find and trust one another; ranks are threads here, up to the sockets."""

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time

import pytest

from ranks import free_port

import zero_c
from zero_c import _handshake, _hosts
from zero_c._address import Address, find_address, first_host, parse_address

DEADLINE_S = 20
_thread = threading.local()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.fixture
def address():
    return Address("127.0.0.1", free_port())


class Ranks:
    """Calls of meet() in threads; `outcome(key)` is what one returned or raised."""

    def __init__(self, address, monkeypatch):
        self.address, self.threads, self.outcomes = address, {}, {}
        monkeypatch.setattr(_handshake, "own_host", lambda: _thread.host)

    def start(self, key, rank, ranks, *, host="a", name="job", token="token", start_timeout_s=10.0, address=None):
        def work():
            _thread.host = host * 32
            began = time.monotonic()
            try:
                self.outcomes[key] = _hosts.meet(rank, ranks, address or self.address, name, token, start_timeout_s)
            except Exception as error:
                error.seconds = time.monotonic() - began
                self.outcomes[key] = error

        self.threads[key] = threading.Thread(target=work, daemon=True)
        self.threads[key].start()

    def outcome(self, key):
        self.threads[key].join(DEADLINE_S)
        assert key in self.outcomes, f"{key} still waits"
        return self.outcomes[key]

    def waits(self, key):
        """Whether it does so after a moment."""
        self.threads[key].join(0.2)
        return key not in self.outcomes

    def refusal(self, key):
        error = self.outcome(key)
        assert type(error) is zero_c.CommError, error
        return str(error)

    def late(self, key):
        error = self.outcome(key)
        assert type(error) is zero_c.Timeout, error
        return str(error)

    def check_met(self, *keys, hosts=None):
        """The ranks, 0 first, have the same hosts, and sockets that connect them; these are closed."""
        outcomes = [self.outcome(key) for key in keys]
        assert not [each for each in outcomes if isinstance(each, Exception)], outcomes
        assert {tuple(found) for found, _ in outcomes} == {tuple(hosts or [0] * len(keys))}
        of_first = outcomes[0][1]
        assert of_first[0] is None and len(of_first) == len(keys)
        for (_, (own,)), other in zip(outcomes[1:], of_first[1:], strict=True):
            with own, other:
                for sock in (own, other):
                    assert sock.gettimeout() is None
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    sock.settimeout(5)
                for here, there in ((own, other), (other, own)):
                    here.sendall(b"to you")
                    assert there.recv(100) == b"to you"


@pytest.fixture
def ranks(address, monkeypatch):
    made = Ranks(address, monkeypatch)
    yield made
    for key in made.threads:
        made.outcome(key)


# ---- the right ones --------------------------------------------------------------


@pytest.mark.parametrize(("names", "hosts"), [("aa", [0, 0]), ("ab", [0, 1]), ("bab", [0, 1, 0]), ("abc", [0, 1, 2]),
                                              ("aabbcabb", [0, 0, 1, 1, 2, 0, 1, 1])])
@pytest.mark.parametrize("token", ["secret", None])
def test_ranks_meet(ranks, names, hosts, token):
    for rank, host in reversed(list(enumerate(names))):
        ranks.start(rank, rank, len(names), host=host, token=token)
    ranks.check_met(*range(len(names)), hosts=hosts)


def has(host):
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", *(["::1"] if has("::1") else [])])
def test_addresses_are_numbers_of_both_kinds_and_names(ranks, host):
    ranks.address = Address(host, ranks.address.port)
    for rank in range(2):
        ranks.start(rank, rank, 2)
    ranks.check_met(0, 1)


def test_others_wait_for_rank_0(ranks):
    ranks.start(1, 1, 2)
    assert ranks.waits(1)
    ranks.start(0, 0, 2)
    ranks.check_met(0, 1)


def test_a_job_meets_again_and_again(ranks):
    for turn in range(8):
        for rank in range(3):
            ranks.start((turn, rank), rank, 3)
        ranks.check_met(*[(turn, rank) for rank in range(3)])


def test_a_name_may_be_unknown_at_first(ranks, monkeypatch):
    known_from = time.monotonic() + 0.5
    resolve = socket.getaddrinfo

    def getaddrinfo(*args, **kwargs):
        if time.monotonic() < known_from:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for rank in range(2):
        ranks.start(rank, rank, 2)
    ranks.check_met(0, 1)


def test_a_rank_that_went_away_may_come_again(ranks):
    ranks.start(0, 0, 3)
    ranks.start("first", 1, 3, start_timeout_s=0.5)
    assert "1 of 3 ranks are not at" in ranks.late("first") and "missing: 2" in ranks.late("first")
    ranks.start("again", 1, 3)
    assert ranks.waits("again")
    ranks.start(2, 2, 3)
    ranks.check_met(0, "again", 2)


# ---- the wrong ones --------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "said"), [
    ({"token": "other"}, "ZERO_C_TOKEN must be the same"), ({"token": None}, "ZERO_C_TOKEN must be the same"),
    ({"name": "other"}, "rank 1 is of another job"), ({"ranks": 4}, "rank 0 expects 3 ranks, rank 1 4"),
    ({"ranks": 2}, "rank 0 expects 3 ranks, rank 1 2"), ({"rank": 3}, "ranks 1 to 2 are expected"),
])
def test_who_does_not_belong_is_told_and_the_others_meet(ranks, wrong, said):
    ranks.start(0, 0, 3)
    ranks.start(1, 1, 3)
    ranks.start("wrong", **{"rank": 1, "ranks": 3, **wrong})
    sentence = ranks.refusal("wrong")
    assert said in sentence and str(ranks.address) in sentence and ranks.outcome("wrong").seconds < 3
    assert ranks.waits(0) and ranks.waits(1)
    ranks.start(2, 2, 3)
    ranks.check_met(0, 1, 2)


def test_a_rank_that_comes_twice_is_named(ranks):
    ranks.start(0, 0, 3, start_timeout_s=2)
    ranks.start(1, 1, 3)
    assert ranks.waits(1)
    ranks.start("twice", 1, 3)
    # Both connect again and again, so on a busy machine the second may be there first.
    second, first = ("twice", 1) if type(ranks.outcome("twice")) is zero_c.CommError else (1, "twice")
    assert "rank 1 has joined already" in ranks.refusal(second)
    for key in (0, first):
        sentence = ranks.late(key)
        assert "missing: 2" in sentence and "rank 1 has joined already" in sentence


def test_a_missing_rank_is_named_on_all(ranks):
    ranks.start(0, 0, 4, start_timeout_s=1)
    ranks.start(2, 2, 4)
    for key in (0, 2):
        sentence = ranks.late(key)
        assert "2 of 4 ranks are not at" in sentence and "missing: 1, 3" in sentence and str(ranks.address) in sentence
        assert "listens at 127.0.0.1, which ranks on other hosts cannot reach" in sentence
    assert ranks.outcome(2).seconds < 3


def test_a_rank_that_gave_up_is_not_missing(ranks):
    ranks.start(0, 0, 3, start_timeout_s=1.2)
    ranks.start(1, 1, 3, start_timeout_s=0.6)
    assert "missing: 2" in ranks.late(1)
    sentence = ranks.late(0)
    assert "2 of 3 ranks are not at" in sentence and "missing: 2; came and went: 1" in sentence


def test_nobody_listens(ranks):
    ranks.start(1, 1, 2, start_timeout_s=0.7)
    sentence = ranks.late(1)
    assert str(ranks.address) in sentence and "Connection refused" in sentence and "missing: 0" in sentence
    ranks.start("name", 1, 2, start_timeout_s=0.3, address=Address("no-such-host.invalid", 5))
    assert "no-such-host.invalid:5" in ranks.late("name")


def test_a_connection_to_itself_is_given_up(ranks, monkeypatch):
    """Linux connects a socket whose own port is the one called; as long as it lives rank 0 cannot listen there."""
    connect, own = socket.create_connection, []

    def create_connection(address, *args):
        if own:
            return connect(address, *args)
        own.append(socket.socket())
        own[0].bind(address)
        own[0].connect(address)
        return own[0]

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(_hosts, "PORT_BUSY_S", 1)
    ranks.start(1, 1, 2)
    assert ranks.waits(1) and own
    ranks.start(0, 0, 2)
    ranks.check_met(0, 1)


def test_a_port_in_use(ranks, monkeypatch):
    monkeypatch.setattr(_hosts, "PORT_BUSY_S", 0.3)
    with socket.create_server(("127.0.0.1", ranks.address.port)):
        ranks.start(0, 0, 2)
        sentence = ranks.refusal(0)
    assert str(ranks.address) in sentence and "another program has that port" in sentence


def test_an_address_of_another_host(ranks):
    ranks.start(0, 0, 2, address=Address("192.0.2.1", 5))
    assert "192.0.2.1:5" in ranks.refusal(0) and ranks.outcome(0).seconds < 2


def test_rank_0_listens_on_one_address_only(address):
    listening = _hosts._listen_at(address)
    try:
        assert [sock.getsockname() for sock in listening] == [("127.0.0.1", address.port)]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", address.port), 2)
    finally:
        for sock in listening:
            sock.close()


# ---- strangers -------------------------------------------------------------------


def knock(address):
    end = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((address.host, address.port), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)


def frame(text, proof=bytes(32), magic=_handshake.MAGIC, length=None):
    return struct.pack(">4sI32s", magic, len(text) if length is None else length, proof) + text


HELLO = {"protocol": _handshake.PROTOCOL, "version": _handshake.VERSION, "job": "0" * 32, "ranks": 2, "rank": 1,
         "host": "h", "nonce": "0" * 32}
GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n", bytes(10000), os.urandom(3000), frame(b"", magic=b"zc\0\2"), frame(b"x" * 5000),
    frame(b"", length=2**32 - 1), frame(b"not json"), frame(b"[" * 1000), frame(b"\xff\xfe"), frame(b"[]"), frame(b"{}"),
    frame(json.dumps(HELLO).encode() + b" and more", length=20), frame(b""),
    *[frame(json.dumps({**HELLO, **change}).encode()) for change in (
        {"rank": "1"}, {"rank": True}, {"rank": 1.5}, {"ranks": None}, {"nonce": "\ud800" * 32}, {"nonce": ""}, {"host": 3})],
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_ended_without_an_answer(ranks, garbage):
    ranks.start(0, 0, 2)
    with knock(ranks.address) as stranger:
        stranger.settimeout(0.6 * _hosts.HELLO_S)  # it is not waited for more
        stranger.sendall(garbage)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while part := stranger.recv(4096):
                heard += part
    length, _ = _handshake.head(heard[:_handshake.HEAD.size], 1024) if heard else (-_handshake.HEAD.size, None)
    assert len(heard) == _handshake.HEAD.size + length  # the greeting
    assert ranks.waits(0)
    ranks.start(1, 1, 2)
    ranks.check_met(0, 1)


@pytest.mark.parametrize("change", [{"rank": 10**300}, {"rank": -1}, {"version": "\ud800\n\x1b[31m" * 20}, {"protocol": 7},
                                    {"job": "\udfff"}, {}])
def test_hellos_of_strangers_get_a_sentence(ranks, change):
    ranks.start(0, 0, 3, start_timeout_s=0.6)
    with knock(ranks.address) as stranger:
        stranger.sendall(frame(json.dumps({**HELLO, **change}).encode()))
        heard = b""
        while part := stranger.recv(4096):
            heard += part
    assert b'"refused":"' in heard
    assert ranks.late(0).isprintable()


def test_a_hello_cannot_be_repeated(ranks):
    ranks.start(0, 0, 3)
    job = _handshake.Job(1, 3, ranks.address, "job", "token", 5)
    _thread.host = "a"
    with knock(ranks.address) as first, knock(ranks.address) as second:
        text, _ = _hosts._receive(first, 1024, time.monotonic() + 5)
        hello = _handshake.hello(job, "0" * 32, _handshake.read_greeting(text))
        second.sendall(hello)
        _hosts._receive(second, 1024, time.monotonic() + 5)
        text, _ = _hosts._receive(second, 1024, time.monotonic() + 5)
        assert b"ZERO_C_TOKEN" in text
    for rank in (1, 2):
        ranks.start(rank, rank, 3)
    ranks.check_met(0, 1, 2)


def test_a_flood_of_idle_connections(ranks):
    ranks.start(0, 0, 3)
    with contextlib.ExitStack() as flood:
        first, *_ = [flood.enter_context(knock(ranks.address)) for _ in range(_hosts.GUESTS_MAX + 50)]
        began = time.monotonic()
        while first.recv(100):
            pass  # the greeting; then rank 0 ends it to make room
        for rank in (1, 2):
            ranks.start(rank, rank, 3)
        ranks.check_met(0, 1, 2)
        assert time.monotonic() - began < 2


def test_slow_clients_are_dropped_and_keep_nobody(ranks, monkeypatch):
    monkeypatch.setattr(_hosts, "HELLO_S", 0.6)
    ranks.start(0, 0, 2)
    slow = knock(ranks.address)
    began = time.monotonic()
    with slow, pytest.raises(ConnectionError):
        for byte in frame(json.dumps(HELLO).encode()):
            slow.sendall(bytes([byte]))
            time.sleep(0.05)
    assert 0.4 < time.monotonic() - began < 3
    with knock(ranks.address):
        ranks.start(1, 1, 2)
        ranks.check_met(0, 1)


def test_running_out_of_descriptors_is_told_and_ends(ranks, monkeypatch):
    room = [3]
    accept = socket.socket.accept

    def limited(sock):
        if room[0] == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        taken = accept(sock)
        room[0] -= 1
        return taken

    monkeypatch.setattr(socket.socket, "accept", limited)
    used_s = time.process_time()
    ranks.start(0, 0, 5, start_timeout_s=2)
    for rank in range(1, 5):
        ranks.start(rank, rank, 5, start_timeout_s=4)
    assert "ulimit" in ranks.late(0)
    assert time.process_time() - used_s < 0.4  # rank 0 sleeps until there is room


class Impostor:
    """Listens where rank 0 should, and says what it wants."""

    def __init__(self, address, *frames):
        self.server = socket.create_server((address.host, address.port))
        self.frames = frames
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.server.accept()
                with sock:
                    sock.settimeout(2)
                    for each in self.frames:
                        sock.sendall(each)
                        sock.recv(2000)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join(5)


def test_an_impostor_is_not_believed(ranks):
    hosts = json.dumps({"hosts": [0, 0]}).encode()
    with Impostor(ranks.address, _handshake.greeting("0" * 32), frame(hosts)):
        ranks.start(1, 1, 2)
        assert "does not know the token" in ranks.refusal(1)
    with Impostor(ranks.address, _handshake.greeting("0" * 32), frame(json.dumps({"refused": "\x1b\ud800" * 50}).encode())):
        ranks.start("refused", 1, 2)
        sentence = ranks.refusal("refused")
        assert sentence.isprintable() and len(sentence) < 800


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(60), frame(b"{}"), frame(b"x" * 3000), b""])
def test_other_services_are_not_waited_for(ranks, said):
    with Impostor(ranks.address, said):
        ranks.start(1, 1, 2, start_timeout_s=0.8)
        assert str(ranks.address) in ranks.late(1)


# ---- addresses -------------------------------------------------------------------


@pytest.mark.parametrize(("text", "host", "port"), [("node-1.net:29501", "node-1.net", 29501), ("10.0.0.7:1", "10.0.0.7", 1),
                                                    ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535), ("[::1]:5", "::1", 5)])
def test_an_address_is_read_and_written(text, host, port):
    address = parse_address(text, "address")
    assert (address.host, address.port) == (host, port) and str(address) == text


@pytest.mark.parametrize(("text", "said"), [
    ("host", "'host:port'"), ("host:", "port ''"), (":5", "'host:port'"), ("host:0", "port '0'"), ("host:65536", "port '65536'"),
    ("host:x", "port 'x'"), ("host:-1", "port '-1'"), ("host:１", "port"), ("::1:5", "'[::1]:29500'"), ("", "'host:port'"),
    ("a b:5", "names host 'a b'"), ("0.0.0.0:5", "every network"), ("[::]:5", "every network"), (5, "is 5"), (None, "is None"),
    (b"host:5", "'host:port'"), ("tcp://host:5", "'host:port'"),
])
def test_wrong_addresses_are_named(text, said):
    with pytest.raises(ValueError) as caught:
        parse_address(text, "ZERO_C_ADDR")
    assert said in str(caught.value) and "ZERO_C_ADDR" in str(caught.value)


SLURM = {"SLURM_STEP_ID": "2", "SLURM_JOB_ID": "70003", "SLURM_STEP_NODELIST": "gpu[07-09],login"}


@pytest.mark.parametrize(("environ", "found"), [
    ({"ZERO_C_ADDR": "a:1", "MASTER_ADDR": "b", "MASTER_PORT": "2"}, "a:1"),
    ({"MASTER_ADDR": "b", "MASTER_PORT": "2", **SLURM}, "b:3"), ({"MASTER_ADDR": "::1", "MASTER_PORT": "2"}, "[::1]:3"),
    (SLURM, "gpu07:20205"), ({**SLURM, "ZERO_C_ADDR": "a:1"}, "a:1"), ({**SLURM, "MASTER_ADDR": "b"}, "gpu07:20205"),
])
def test_launchers_tell_the_address(environ, found):
    assert str(find_address(None, environ)) == found
    assert str(find_address("given:9", environ)) == "given:9"


@pytest.mark.parametrize(("environ", "said"), [
    ({}, "ZERO_C_ADDR=host:port"), ({"MASTER_ADDR": "b"}, "MASTER_ADDR and MASTER_PORT"), ({"ZERO_C_ADDR": ""}, "ZERO_C_ADDR is ''"),
    ({"MASTER_ADDR": "b", "MASTER_PORT": "65535"}, "MASTER_PORT has port '65535'; legal are 1 to 65534"),
    ({"MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "5"}, "MASTER_ADDR is 0.0.0.0"), ({**SLURM, "SLURM_JOB_ID": ""}, "ZERO_C_ADDR=host:port"),
    ({**SLURM, "SLURM_STEP_NODELIST": "["}, "ZERO_C_ADDR=host:port"), ({"SLURM_STEP_ID": "1", "SLURM_JOB_ID": "1"}, "ZERO_C_ADDR=host:port"),
])
def test_what_is_missing_for_an_address_is_said(environ, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        find_address(None, environ)


@pytest.mark.parametrize(("hosts", "first"), [
    ("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[001-003,7],m", "n001"), ("r[2,5]n[10-11].net,x", "r2n10.net"), ("n[4]", "n4"),
    ("", None), ("n[", None), ("n[a-b]", None), ("n[1-3", None), ("n 1", None), (",n", None),
])
def test_the_first_host_of_slurms_lists(hosts, first):
    assert first_host(hosts) == first


def test_the_own_host(monkeypatch):
    real = _handshake.own_host()
    assert real == _handshake.own_host() and len(real) == 32
    monkeypatch.setenv("ZERO_C_HOST", "here")
    named = _handshake.own_host()
    monkeypatch.setenv("ZERO_C_HOST", "there")
    assert len({real, named, _handshake.own_host()}) == 3
