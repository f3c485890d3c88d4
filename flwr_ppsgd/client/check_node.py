"""Would the SuperLink let this machine's SuperNode in? One line for each reason why not.

Flower's SuperNode ends with a page about its exit codes. This asks the same questions before, and
changes nothing: the last one is a request to be let in, signed with the node's key, with a
heartbeat that no SuperLink takes. Of Flower's internals it needs the protobuf message of that
request.
"""

import datetime
import http.client
import json
import ssl
import stat
from base64 import b64encode
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from flwr_ppsgd.checks import printable

PATH = "/v1/fleet/activate-node"
MEDIA_TYPE = "application/protobuf"
NO_HEARTBEAT = -1.0  # seconds; refused only after the key was found
PATIENCE = 20.0  # seconds
LONGEST_REASON = 200  # characters
INVALID_HEARTBEAT = 2003  # Flower's codes
NOT_ACTIVATED = 2004
EXPIRED = 10  # OpenSSL's codes for what is wrong with a certificate
OTHER_NAME = (62, 64)
NOTHING_LOST = "θ stays on this machine, and goes on once the SuperNode is let in"


class NotLetInError(RuntimeError):
    """Why this machine's SuperNode would not take part, and what to change."""


def check_connection(address: str, root_certificates: Path, key: Path) -> str:
    """One line that says that all is well; NotLetInError if it is not.

    Args:
        address: of the proxy, or of the SuperLink, as HOST:PORT.
        root_certificates: the certificate authority that the SuperNode trusts.
        key: the SuperNode's private key.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the address must be HOST:PORT, got {address!r}")
    private = _private_key(key)
    try:
        context = ssl.create_default_context(cafile=str(root_certificates))
    except OSError as error:
        raise NotLetInError(
            f"{root_certificates} cannot be read as a certificate ({error.strerror or error}): ask "
            "the server's operator for the certificate of the authority"
        ) from None
    connection = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE, context=context)
    try:
        _handshake(connection, address, root_certificates)
        answer = _request_activation(connection, private)
        _check_answer(answer, address, key)
    except (OSError, http.client.HTTPException) as error:
        raise NotLetInError(
            f"{address} broke the connection off ({error}): try again; {NOTHING_LOST}"
        ) from None
    finally:
        connection.close()
    return f"{address} lets this SuperNode in: certificate, key and clock are right"


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    remedy = "make one with: ssh-keygen -t ecdsa -b 384 -N '' -f key"
    try:
        data = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise NotLetInError(f"the key {path} cannot be read ({error.strerror}): {remedy}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise NotLetInError(
            f"others on this machine may read the key {path} (mode {mode:o}): chmod 600 {path}"
        )
    in_openssh = data.startswith(b"-----BEGIN OPENSSH")
    load = serialization.load_ssh_private_key if in_openssh else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except (ValueError, TypeError) as error:
        reason = printable(error, LONGEST_REASON)
        raise NotLetInError(f"{path} is not a private key ({reason}): {remedy}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise NotLetInError(f"the key {path} is not an elliptic curve key: {remedy}")
    return key


def _handshake(connection: http.client.HTTPSConnection, address: str, trusted: Path) -> None:
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        shown = f"the certificate that {address} shows"
        if error.verify_code == EXPIRED:
            reason = (
                f"{shown}, or that of its authority in {trusted}, has expired, or this machine's "
                f"clock is wrong: the server's operator has to renew it; {NOTHING_LOST}"
            )
        elif error.verify_code in OTHER_NAME:
            reason = (
                f"{shown} is for another name ({error.verify_message}): connect by the name that "
                "the server's operator gave you"
            )
        else:
            reason = (
                f"{shown} is not of the authority in {trusted} ({error.verify_message}): somebody "
                "else answers there, or the authority was replaced; ask the server's operator, and "
                "send nothing before"
            )
        raise NotLetInError(reason) from None
    except ssl.SSLError as error:
        raise NotLetInError(
            f"{address} does not speak TLS ({error.reason}): is it the proxy's port?"
        ) from None
    except OSError as error:
        raise NotLetInError(
            f"nobody answers at {address} ({error.strerror or error}): the proxy may be down. A "
            f"SuperNode that runs tries again by itself; {NOTHING_LOST}"
        ) from None


def _request_activation(
    connection: http.client.HTTPSConnection, key: ec.EllipticCurvePrivateKey
) -> http.client.HTTPResponse:
    """What Flower answers to a signed request that it cannot grant."""
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    now = datetime.datetime.now(datetime.UTC).isoformat()
    signature = key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=NO_HEARTBEAT)
    headers = {
        "Content-Type": MEDIA_TYPE,
        "flwr-public-key": b64encode(public).decode("ascii"),
        "flwr-timestamp": now,
        "flwr-signature": b64encode(signature).decode("ascii"),
    }
    connection.request("POST", PATH, request.SerializeToString(), headers)
    return connection.getresponse()


def _check_answer(answer: http.client.HTTPResponse, address: str, key: Path) -> None:
    """NotLetInError unless everything but the heartbeat was right."""
    try:
        code = json.loads(answer.read())["code"]  # Flower's own
    except (ValueError, KeyError, TypeError):
        code = None
    if code == INVALID_HEARTBEAT:
        return
    if code == NOT_ACTIVATED:
        raise NotLetInError(
            f"the key {key} is not registered at the SuperLink, or no longer: give {key}.pub to "
            f"the server's operator, who registers and enrols it; {NOTHING_LOST}"
        )
    if answer.status == http.client.UNAUTHORIZED:
        raise NotLetInError(
            f"{address} refuses the signature: this machine's clock is {_clock(answer)}; set it "
            "right"
        )
    if answer.status in (http.client.BAD_GATEWAY, http.client.GATEWAY_TIMEOUT):
        raise NotLetInError(
            f"the proxy at {address} runs but the SuperLink behind it does not: a SuperNode that "
            f"runs tries again by itself; {NOTHING_LOST}"
        )
    raise NotLetInError(
        f"{address} gives an answer that no SuperLink with authentication gives (status "
        f"{answer.status}, code {code}): is it the right port, and the same version of Flower?"
    )


def _clock(answer: http.client.HTTPResponse) -> str:
    """How far this machine's clock is from the server's, in words."""
    try:
        there = parsedate_to_datetime(answer.headers["Date"])
        seconds = (datetime.datetime.now(datetime.UTC) - there).total_seconds()
    except (TypeError, ValueError):
        return "perhaps wrong"
    return f"{abs(seconds):.0f} s {'behind' if seconds < 0 else 'ahead of'} the server's"
