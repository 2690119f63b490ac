# SPDX-License-Identifier: Apache-2.0
"""The handshake accepts the holder of the secret and nobody else, and never waits for longer than it was told."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetccl.errors import TransportError
from hetccl.native import handshake
from hetccl.native.handshake import HandshakeError, Versions, accept, dial

SECRET = b"\x01" * 32
ACCEPT = dict(secret=SECRET, job="job", rank=1, timeout=2.0)
DIAL = dict(secret=SECRET, job="job", rank=0, peer=1, purpose="collective", timeout=2.0)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = socket.create_connection(server.getsockname())
        acceptor, _ = server.accept()
    with dialer, acceptor:
        yield dialer, acceptor


class Side(threading.Thread):
    """One side in a thread; it closes its socket when refused, as users of the handshake do."""

    def __init__(self, function: Any, sock: socket.socket, arguments: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.call = (function, sock, arguments)
        self.result: Any = None
        self.start()

    def run(self) -> None:
        function, sock, arguments = self.call
        try:
            self.result = function(sock, **arguments)
        except HandshakeError as error:
            self.result = error
            sock.close()

    def outcome(self) -> Any:
        self.join(10)
        assert not self.is_alive(), "the handshake hangs"
        return self.result


def both(
    pair: tuple[socket.socket, socket.socket], dialing: dict[str, Any], accepting: dict[str, Any]
) -> tuple[Any, Any]:
    sides = Side(dial, pair[0], DIAL | dialing), Side(accept, pair[1], ACCEPT | accepting)
    return sides[0].outcome(), sides[1].outcome()


def test_good(pair):
    dialed, accepted = both(pair, {}, {})
    assert (dialed.peer, dialed.purpose, dialed.version) == (1, "collective", 1)
    assert (accepted.peer, accepted.purpose, accepted.version) == (0, "collective", 1)
    assert dialed.key == accepted.key and len(dialed.key) == 32
    assert dialed.key.hex() not in repr(dialed)


def test_nothing_of_the_stream_is_eaten(pair):
    def dial_and_send(sock, **arguments):
        session = dial(sock, **arguments)
        sock.sendall(b"first bytes")
        return session

    sides = Side(dial_and_send, pair[0], DIAL), Side(accept, pair[1], ACCEPT)
    assert sides[0].outcome().peer == 1 and sides[1].outcome().peer == 0
    assert pair[1].recv(100) == b"first bytes"


def test_socket_stays_as_blocking_as_it_was(pair):
    pair[0].settimeout(7.0)
    pair[1].setblocking(False)
    both(pair, {}, {})
    assert pair[0].gettimeout() == 7.0 and pair[1].gettimeout() == 0.0


@pytest.mark.parametrize("change", [{"secret": b"\x02" * 32}, {"job": "another job"}])
def test_other_secret_or_job(pair, change):
    dialed, accepted = both(pair, change, {})
    assert isinstance(accepted, HandshakeError) and accepted.reason == "secret"
    assert isinstance(dialed, HandshakeError) and dialed.reason == "truncated"
    assert "secret" in str(dialed)


def test_empty_secret_is_refused(pair):
    with pytest.raises(HandshakeError, match="empty"):
        dial(pair[0], **DIAL | {"secret": b""})


def test_the_acceptor_must_prove_itself_too(pair):
    """A listener without the secret that answers with a well-formed welcome is not believed."""
    dialer = Side(dial, pair[0], DIAL)
    pair[1].sendall(bytes(32))
    hello = read(pair[1], HELLO_BYTES)
    assert SECRET not in hello
    body = handshake._WELCOME.pack(handshake._WELCOME_MAGIC, 1, 1, 1, 0, 1, 1, b"h")
    pair[1].sendall(body + bytes(32))
    assert dialer.outcome().reason == "secret"


def test_reflection(pair):
    """What the dialer itself sent proves nothing when it comes back."""
    dialer = Side(dial, pair[0], DIAL)
    pair[1].sendall(bytes(32))
    hello = read(pair[1], HELLO_BYTES)
    pair[1].sendall(hello[: handshake._WELCOME.size + 32])
    assert dialer.outcome().reason == "secret"


def test_replay(pair):
    """A whole recorded dialer side is refused by a new connection: its challenge differs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        middle_out = socket.create_connection(server.getsockname())
        target, _ = server.accept()
    with middle_out, target:
        first = Side(accept, target, ACCEPT)
        dialer = Side(dial, pair[0], DIAL)
        pair[1].sendall(read(middle_out, 32))
        recorded = read(pair[1], HELLO_BYTES)
        middle_out.sendall(recorded)
        pair[1].sendall(read(middle_out, handshake._WELCOME.size + 32))
        assert first.outcome().peer == 0 and dialer.outcome().peer == 1, "the recording was not a good handshake"
    with socket.create_server(("127.0.0.1", 0)) as server:
        replayer = socket.create_connection(server.getsockname())
        again, _ = server.accept()
    with replayer, again:
        second = Side(accept, again, ACCEPT)
        replayer.sendall(recorded)
        assert second.outcome().reason == "secret"
        assert len(drain(replayer)) == 32, "a stranger gets the challenge and nothing else"


def test_truncated(pair):
    acceptor = Side(accept, pair[1], ACCEPT)
    pair[0].sendall(bytes(HELLO_BYTES - 1))
    pair[0].shutdown(socket.SHUT_WR)
    assert acceptor.outcome().reason == "truncated"


def test_oversized(pair, monkeypatch):
    """A proven peer that sends more than a hello before the answer breaks the protocol."""
    real = socket.socket.send

    def send_more(sock, data, *flags):
        return min(real(sock, bytes(data) + b"x" if len(data) == HELLO_BYTES else data, *flags), len(data))

    class Socket(socket.socket):
        send = send_more

    with Socket(fileno=pair[0].detach()) as dialer:
        acceptor = Side(accept, pair[1], ACCEPT)
        with pytest.raises(HandshakeError):
            dial(dialer, **DIAL)
        assert acceptor.outcome().reason == "oversized"


def test_garbage_of_any_length_is_refused_unparsed(pair):
    acceptor = Side(accept, pair[1], ACCEPT)
    pair[0].sendall(b"GET / HTTP/1.1\r\n" * 4096)
    assert acceptor.outcome().reason == "secret"


def test_slow_stranger(pair):
    """Bytes that drip in do not extend the deadline."""
    start = time.monotonic()
    acceptor = Side(accept, pair[1], ACCEPT | {"timeout": 0.5})
    while acceptor.is_alive() and time.monotonic() - start < 5:
        try:
            pair[0].send(b"x")
        except OSError:
            break
        time.sleep(0.05)
    assert acceptor.outcome().reason == "timeout"
    assert 0.4 < time.monotonic() - start < 1.5


def test_silent_acceptor(pair):
    start = time.monotonic()
    with pytest.raises(HandshakeError) as caught:
        dial(pair[0], **DIAL | {"timeout": 0.3})
    assert caught.value.reason == "timeout" and 0.25 < time.monotonic() - start < 1.5


def test_versions_highest_common(pair):
    dialed, accepted = both(pair, {"versions": Versions(1, 4)}, {"versions": Versions(2, 3)})
    assert dialed.version == accepted.version == 3


@pytest.mark.parametrize(("ours", "theirs"), [((1, 2), (3, 5)), ((6, 7), (3, 5))])
def test_no_common_version_names_both(pair, ours, theirs):
    for error in both(pair, {"versions": Versions(*ours)}, {"versions": Versions(*theirs)}):
        assert isinstance(error, HandshakeError) and error.reason == "version"
        assert f"{ours[0]} to {ours[1]}" in str(error) and f"{theirs[0]} to {theirs[1]}" in str(error)
        assert str(error).count(socket.gethostname()) == 2


def test_wrong_rank(pair):
    dialed, accepted = both(pair, {}, {"rank": 2})
    assert dialed.reason == accepted.reason == "rank"
    assert "rank 2" in str(dialed) and "rank 1" in str(dialed)


def test_own_rank(pair):
    dialed, accepted = both(pair, {"peer": 1, "rank": 1}, {})
    assert dialed.reason == accepted.reason == "rank"


def test_every_flipped_bit_is_noticed(pair):
    """Any change to the dialer's frame on its way is refused (one bit of every byte)."""
    for position in range(HELLO_BYTES):
        with socket.create_server(("127.0.0.1", 0)) as server:
            out = socket.create_connection(server.getsockname())
            target, _ = server.accept()
        inner, outer = socket.socketpair()
        with out, target, inner, outer:
            acceptor = handshake.Acceptor(target, secret=SECRET, job="job", rank=1)
            dialer = Side(dial, inner, DIAL)
            outer.sendall(read(out, 32))
            frame = bytearray(read(outer, HELLO_BYTES))
            frame[position] ^= 1 << (position % 8)
            out.sendall(frame)
            with pytest.raises(HandshakeError) as caught:
                while acceptor.step() is None:
                    pass
            assert caught.value.reason == "secret", position
            outer.close()
            dialer.outcome()


def test_error_is_a_transport_error_and_can_be_pickled():
    error = pickle.loads(pickle.dumps(HandshakeError("text", reason="secret", peer=3)))
    assert isinstance(error, TransportError) and (str(error), error.reason, error.peer) == ("text", "secret", 3)


def test_long_purpose_is_refused_before_anything_is_sent(pair):
    pair[1].sendall(bytes(32))
    with pytest.raises(HandshakeError, match="at most 96"):
        dial(pair[0], **DIAL | {"purpose": "x" * 97})


HELLO_BYTES = handshake._HELLO.size + 32


def read(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    sock.settimeout(5)
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        assert part, "closed too early"
        data += part
    return data


def drain(sock: socket.socket) -> bytes:
    data = b""
    sock.settimeout(5)
    try:
        while part := sock.recv(4096):
            data += part
    except ConnectionResetError:
        pass
    return data
