"""Who belongs to the population, when nodes restart under other ids."""

import secrets
from collections.abc import Iterable

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message
from flwr.proto.node_pb2 import NodeInfo

from flwr_ppsgd import PPSGD, Poisson, Release, client_app
from flwr_ppsgd.server.enrolment import Enrolment, OnlineNode, key_fingerprint
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.training import Enrolled
from tests.support.toy import strategy, toy_learner, w0


def key() -> tuple[bytes, str]:
    """A public key as Flower keeps it, and as ``ssh-keygen`` writes it."""
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem, public.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()


class SuperNodes(InProcessGrid):
    """A grid that says about its nodes what a SuperLink would."""

    def __init__(self, *nodes: NodeInfo) -> None:
        super().__init__(client_app(toy_learner), 9)
        self.nodes = list(nodes)

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.nodes]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self.nodes


def node(number: int, name: str = "", public_key: bytes | None = None) -> NodeInfo:
    return NodeInfo(
        node_id=1_000_000 + number,
        name=name,
        public_key=key()[0] if public_key is None else public_key,
    )


def asked(ppsgd: PPSGD, on: SuperNodes, round_: int = 1) -> list[int]:
    messages: list[Message] = ppsgd.configure_train(round_, w0(), ConfigRecord(), on)
    ppsgd.aggregate_train(round_, [])
    return [message.metadata.dst_node_id - 1_000_000 for message in messages]


def users(population: int, enrolled: list[str] | list[int] | None = None) -> PPSGD:
    return strategy(
        release=Release(Poisson(population, 1.0), 1.0, 5.0),
        enrolled=Enrolled(enrolled, min_online=0.0),
    )


def test_a_name_is_followed_to_wherever_its_node_is_now() -> None:
    ppsgd, on = users(2, ["ada", "ben"]), SuperNodes(node(1, "ada"), node(2, "ben"), node(3, "eve"))
    assert asked(ppsgd, on) == [1, 2]
    on.nodes = [node(7, "ben"), node(8, "ada")]
    assert asked(ppsgd, on, 2) == [8, 7]
    on.nodes = [node(7, "ben")]
    assert asked(ppsgd, on, 3) == [7], "whoever is offline counts as zero"
    assert ppsgd.ledger.rounds == 3
    assert "To each of the 2 enrolled users" in ppsgd.privacy_statement()
    assert "NOT claimed" not in ppsgd.privacy_statement()


def test_a_public_key_is_an_identity_in_either_form() -> None:
    (pem, ssh), (other, _) = key(), key()
    ppsgd = users(2, [ssh, other.decode()])
    on = SuperNodes(node(4, public_key=other), node(5, public_key=pem), node(6))
    assert asked(ppsgd, on) == [5, 4]
    assert "NOT claimed" not in ppsgd.privacy_statement()


@pytest.mark.parametrize("by", ["key", "fingerprint"])
def test_a_node_that_is_named_like_a_key_takes_nobodys_place(by: str) -> None:
    pem, ssh = key()
    entry = ssh if by == "key" else key_fingerprint(pem).upper()
    ppsgd = users(2, [entry, "ben"])
    impostor = node(1, key_fingerprint(pem))
    assert asked(ppsgd, SuperNodes(impostor, node(2, "ben"))) == [2]
    owner = node(3, "ben", pem)
    assert asked(ppsgd, SuperNodes(impostor, node(2, "ben"), owner), 2) == [3, 2]
    names = (ssh, key_fingerprint(pem).upper(), f" {key_fingerprint(pem)}")
    for round_, name in enumerate(names, start=3):
        assert asked(ppsgd, SuperNodes(node(4, name), node(2, "ben")), round_) == [2]


def test_an_open_enrolment_takes_no_key_for_a_name() -> None:
    pem, _ = key()
    ppsgd = users(2)
    on = SuperNodes(node(1, key_fingerprint(pem)), node(2, public_key=pem))
    assert asked(ppsgd, on) == [1, 2]


SHORT = "must go on with a SHA-256"
UNREADABLE = "an enrolled public key cannot be read"
FINGERPRINTS = ("key:", "key:board-3", "key:" + 63 * "a", "key:" + 65 * "a")
KEYS = ("ecdsa-sha2-nistp384 AAAA", "ssh-rsa !", "-----BEGIN nothing")
BAD_ENTRIES = dict.fromkeys(FINGERPRINTS, SHORT) | dict.fromkeys(KEYS, UNREADABLE)


@pytest.mark.parametrize("entry", BAD_ENTRIES)
def test_a_damaged_key_is_refused_and_never_taken_for_a_name(entry: str) -> None:
    with pytest.raises(ValueError, match=BAD_ENTRIES[entry]):
        users(1, [entry])


def test_of_two_nodes_under_one_name_neither_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    """The round goes on, charged, with that place counting as zero."""
    ppsgd = users(2, ["ada", "ben"])
    on = SuperNodes(node(1, "ada"), node(2, "ada"), node(3, "ben"))
    caplog.set_level("DEBUG", logger="flwr.ppsgd")
    assert asked(ppsgd, on) == [3]
    on.nodes.append(node(4, "eve"))
    assert asked(ppsgd, on, 2) == [3]
    said = [each for each in caplog.records if "two nodes are online" in each.message.lower()]
    assert [each.levelname for each in said] == ["WARNING", "DEBUG"], "once per change"
    assert "ada" not in said[0].message
    assert "ada" in said[1].message
    on.nodes = [node(1, "ada"), node(3, "ben")]
    assert asked(ppsgd, on, 3) == [1, 3]
    on.nodes.append(node(2, "ada"))
    assert asked(ppsgd, on, 4) == [3]
    assert caplog.text.count("neither takes part") == 2
    assert ppsgd.ledger.rounds == 4


def test_strangers_under_one_name_are_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    on = SuperNodes(node(1, "ada"), node(2, "eve"), node(3, "eve"))
    assert asked(users(1, ["ada"]), on) == [1]
    assert "neither takes part" not in caplog.text


@pytest.mark.parametrize("enrolled", [None, [1_000_001, 1_000_002]])
def test_without_authentication_restarts_are_not_covered_and_the_statement_says_why(
    enrolled: list[str] | list[int] | None,
) -> None:
    ppsgd = users(2, enrolled)
    assert asked(ppsgd, SuperNodes(node(1), node(2))) == [1, 2]
    statement, data = ppsgd.privacy_statement(), ppsgd.privacy_data()
    assert "To each of the 2 enrolled nodes" in statement
    assert "User-level privacy across restarts of a node is NOT claimed" in statement
    assert "--enable-supernode-auth" in statement
    assert data["guarantee"] == "node-level joint differential privacy"
    assert data["unit"] == "one start of a node"


def test_a_simulation_has_no_restarts_to_speak_of() -> None:
    ppsgd = users(2)
    nodes = [node(number, public_key=secrets.token_bytes(32)) for number in (1, 2)]
    asked(ppsgd, SuperNodes(*nodes))
    assert "NOT claimed" not in ppsgd.privacy_statement()


def test_open_enrolment_is_for_simulation_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ppsgd = users(2)
    on = SuperNodes(node(1, "ada"), node(2, "ben"))
    assert asked(ppsgd, on) == [1, 2]
    assert asked(ppsgd, on, 2) == [1, 2]
    assert caplog.text.count("enrolment is open, which is meant for simulations") == 1
    statement = ppsgd.privacy_statement()
    assert "To each of the 2 enrolled nodes" in statement
    assert "whoever connects first has a place, and one user can take several" in statement
    assert "--enable-supernode-auth" not in statement, "these nodes have names"


def test_waiting_ends_with_a_line_that_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of ten are online. It is said at once and then every minute, for five minutes."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("flwr_ppsgd.server.enrolment.time.sleep", lambda _: None)
    monkeypatch.setattr("flwr_ppsgd.server.enrolment.time.monotonic", lambda: float(next(clock)))
    enrolment = Enrolment(10, Enrolled(min_online=0.5, wait_timeout=300.0))
    with (
        caplog.at_level("INFO", logger="flwr.ppsgd"),
        pytest.raises(TimeoutError, match=r"2 of 10 .* waits for 5 .*num-supernodes=10"),
    ):
        enrolment.refresh(lambda: [OnlineNode(1), OnlineNode(2)])
    said = [line for line in caplog.messages if line.startswith("Waiting for 5 of 10")]
    assert len(said) == 5
