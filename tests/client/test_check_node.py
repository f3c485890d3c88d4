"""One line for each reason why a SuperNode would not be let in."""

import http.server
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from typer.testing import CliRunner

from flwr_ppsgd.cli import app
from flwr_ppsgd.client.check_node import NotLetInError, check_connection
from simulations.deployment.federation import free_ports, make_certificates, make_key_pair


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_certificates(tmp_path)
    make_key_pair(tmp_path / "key")
    return tmp_path


class Answer(http.server.BaseHTTPRequestHandler):
    """Always the same answer."""

    status = 400
    body = b'{"code":2003,"detail":"Invalid heartbeat interval."}'
    seen: dict[str, str]

    def do_POST(self) -> None:
        type(self).seen = dict(self.headers)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(place: Path, answer: type[Answer] = Answer) -> Iterator[str]:
    """A server with the certificate in a directory; its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "server.crt", place / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def refusal(address: str, place: Path, *, ca: Path | None = None, key: Path | None = None) -> str:
    """The one line."""
    with pytest.raises(NotLetInError) as caught:
        check_connection(address, ca or place / "ca.crt", key or place / "key")
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_registered_key_is_let_in_and_nothing_is_left_to_replay(place: Path) -> None:
    with answering(place) as address:
        said = check_connection(address, place / "ca.crt", place / "key")
    assert said == f"{address} lets this SuperNode in: certificate, key and clock are right"
    assert {"flwr-signature", "flwr-public-key", "flwr-timestamp"} <= Answer.seen.keys()


ANSWERS = {
    "a key that is not registered": (400, b'{"code":2004}', "is not registered at the SuperLink"),
    "a wrong clock": (401, b'{"detail":"Invalid"}', r"this machine's clock is \d+ s "),
    "a SuperLink that is down": (502, b"<html>", "the SuperLink behind it does not"),
    "something else": (404, b"", r"no SuperLink with authentication gives \(status 404"),
    "somebody who lets everybody in": (200, b"", "no SuperLink with authentication gives"),
    "garbage": (400, b'{"code":[2003]}', "no SuperLink with authentication gives"),
}


@pytest.mark.parametrize("why", ANSWERS)
def test_what_the_superlink_answers_becomes_one_line(why: str, place: Path) -> None:
    status, body, expected = ANSWERS[why]
    answer = type("Other", (Answer,), {"status": status, "body": body})
    with answering(place, answer) as address, pytest.raises(NotLetInError, match=expected):
        check_connection(address, place / "ca.crt", place / "key")


def test_another_authority_is_refused_before_anything_is_signed(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    make_certificates(other)
    Answer.seen = {}
    with answering(place) as address:
        line = refusal(address, place, ca=other / "ca.crt")
    assert "is not of the authority in" in line
    assert "send nothing before" in line
    assert Answer.seen == {}


@pytest.mark.parametrize("ages", [{"server_age": 400}, {"authority_age": 400}])
def test_an_expired_certificate(ages: dict[str, int], place: Path) -> None:
    make_certificates(place, **ages)
    with answering(place) as address:
        line = refusal(address, place)
    assert re.search(r"127.0.0.1:\d+ shows.* has expired.*θ stays on this machine", line)


def test_another_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is for 127.0.0.1 and localhost."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda _host, *more, **named: look_up("127.0.0.1", *more, **named)
    )
    with answering(place) as address:
        port = address.rpartition(":")[2]
        assert "is for another name" in refusal(f"elsewhere.example:{port}", place)


def greet(plain: socket.socket) -> None:
    connection, _ = plain.accept()
    with connection:
        connection.sendall(b"220 mail.example ready\r\n")
        connection.recv(4096)


def test_a_proxy_that_is_down_or_no_proxy_at_all(place: Path) -> None:
    assert "nobody answers at" in refusal(f"127.0.0.1:{free_ports(1)[0]}", place)
    with socket.create_server(("127.0.0.1", 0)) as plain:
        threading.Thread(target=greet, args=(plain,)).start()
        assert "does not speak TLS" in refusal(f"127.0.0.1:{plain.getsockname()[1]}", place)
    with pytest.raises(ValueError, match="must be HOST:PORT, got 'here'"):
        check_connection("here", place / "ca.crt", place / "key")


def test_keys_that_are_none(place: Path) -> None:
    def said(key: Path) -> str:
        return refusal("127.0.0.1:1", place, key=key)

    assert "cannot be read (No such file" in said(place / "nowhere")
    (place / "bad").write_text("nonsense")
    (place / "bad").chmod(0o600)
    assert "bad is not a private key" in said(place / "bad")
    other = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    (place / "bad").write_bytes(other)
    assert "is not an elliptic curve key" in said(place / "bad")
    (place / "key").chmod(0o640)
    assert f"chmod 600 {place / 'key'}" in said(place / "key")


def test_an_authority_that_is_none(place: Path) -> None:
    for path in (place / "key", place / "nowhere"):
        assert "cannot be read as a certificate" in refusal("127.0.0.1:1", place, ca=path)


def test_the_command(place: Path) -> None:
    given = ["--root-certificates", str(place / "ca.crt"), "--key", str(place / "key")]
    with answering(place) as address:
        done = CliRunner().invoke(app, ["check-node", address, *given])
    assert done.exit_code == 0
    assert "lets this SuperNode in" in done.output
    done = CliRunner().invoke(app, ["check-node", address, *given])
    assert isinstance(done.exception, NotLetInError)
