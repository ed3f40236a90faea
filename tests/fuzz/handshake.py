"""What ranks on several hosts say to one another before the C core takes their sockets: zero_c._handshake's readers.

An input is a greeting, a hello or an answer: bytes, or the JSON of a right one with something wrong in it, with a right
proof or a wrong one.

    a reader returns what a right message holds, or raises Wrong or Refused, whose sentence can be printed and is short
    a hello without proof is never believed, nor one of another job, another number of ranks, or of a rank that is there
"""

import json

from choices import Choices
from zero_c import _handshake
from zero_c._address import Address
from zero_c._handshake import Job, Refused, Wrong

RANKS = 3
NONCE = "0" * 32
JOB = Job(0, RANKS, Address("127.0.0.1", 1), "job", "token", 60)
OTHER = Job(0, RANKS, Address("127.0.0.1", 1), "job", "another token", 60)
HELLO = {"protocol": _handshake.PROTOCOL, "version": _handshake.VERSION, "job": JOB.digest, "ranks": RANKS, "rank": 1, "host": "h",
         "nonce": NONCE}
GREETING = {"protocol": _handshake.PROTOCOL, "version": _handshake.VERSION, "nonce": NONCE}
ANSWERS = [{"hosts": [0, 0, 1]}, {"refused": "a sentence", "late": True}]


def text_of(choices, right):
    if choices.below(8) == 0:
        return choices.bytes(200)
    text = json.dumps(choices.edited(right), separators=(",", ":")).encode()
    if choices.below(8) == 0:
        at = choices.below(len(text) + 1)
        text = text[:at] + choices.bytes(4) + text[at + choices.below(3):]
    return text


def check_sentence(text):
    assert isinstance(text, str) and text and text.isprintable() and len(text) <= _handshake.SENTENCE_CHARACTERS, text


def greeting(choices):
    nonce = _handshake.read_greeting(text_of(choices, GREETING)[:_handshake.HELLO_BYTES])
    assert len(nonce) == 32 and nonce.isascii(), nonce


def hello(choices):
    joined = {2: None} if choices.below(2) else {}
    text = text_of(choices, HELLO)[:_handshake.HELLO_BYTES]
    job = JOB if choices.below(8) else OTHER
    proof = job.proof(b"hello", NONCE, text) if choices.below(8) else choices.bytes(32)
    said = _handshake.read_hello(JOB, NONCE, text, proof, joined)
    assert job is JOB and proof == JOB.proof(b"hello", NONCE, text), text
    assert type(said["rank"]) is int and 0 < said["rank"] < RANKS and said["rank"] not in joined, text
    assert said["ranks"] == RANKS and said["job"] == JOB.digest and isinstance(said["host"], str), text


def answer(choices):
    text = text_of(choices, choices.pick(ANSWERS))[:_handshake.HELLO_BYTES + RANKS * _handshake.ANSWER_BYTES_PER_RANK]
    proof = JOB.proof(b"answer", NONCE, text) if choices.below(4) else choices.bytes(32)
    hosts = _handshake.read_answer(JOB, NONCE, text, proof)
    assert proof == JOB.proof(b"answer", NONCE, text), text
    assert len(hosts) == RANKS and all(type(host) is int and 0 <= host < RANKS for host in hosts), text


def head(choices):
    data = bytearray(_handshake.HEAD.pack(_handshake.MAGIC, choices.below(2000), bytes(32)))
    for _ in range(choices.below(4)):
        data[choices.below(len(data))] = choices.byte()
    length, proof = _handshake.head(bytes(data), _handshake.HELLO_BYTES)
    assert 0 <= length <= _handshake.HELLO_BYTES and len(proof) == 32


def one_input(data):
    choices = Choices(data)
    try:
        choices.pick([greeting, hello, hello, answer, answer, head])(choices)
    except Wrong as wrong:
        check_sentence(str(wrong))
    except Refused as refused:
        sentence, what = refused.args
        check_sentence(sentence)
        assert type(what) in (bool, str), what  # rank 0 gets the nonce to answer to, others whether ranks are missing
