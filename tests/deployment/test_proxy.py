"""The proxy in front of a SuperLink: SuperNodes pass, strangers with the CA certificate do not."""

import http.client
import json
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from flwr.supercore.protobuf import translation
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode import fleet_http_client

from flwr_ppsgd.client.check_node import NotLetInError, check_connection
from simulations.deployment.federation import (
    PROXY_CONFIG,
    Federation,
    has_nginx,
    make_key_pair,
    program,
    wait_for,
    write_app,
)
from tests.deployment.harness import COMPONENTS, MODULE, USERS, Deployment, check

needs_nginx = pytest.mark.skipif(not has_nginx(), reason="nginx is not installed")
REFUSED = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}


def passed_on() -> set[str]:
    return set(re.findall(r"location = (\S+) ", PROXY_CONFIG.read_text(encoding="utf-8")))


def test_the_paths_are_those_that_supernodes_of_this_flower_use() -> None:
    """But for the two that need no authentication to have an effect."""
    source = Path(fleet_http_client.__file__).read_text(encoding="utf-8")
    used = set(re.findall(r'path="(/v1/[^"]+)"', source))
    assert passed_on() == used - REFUSED
    assert used > REFUSED


@needs_nginx
def test_nginx_takes_the_configuration_and_its_log_is_off(tmp_path: Path) -> None:
    made = Federation(tmp_path)
    config = tmp_path / "nginx.conf"
    config.write_text(made.proxy_config(), encoding="utf-8")
    command = [program("nginx"), "-t", "-e", tmp_path / "errors", "-p", tmp_path, "-c", config]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^[^#]*@", made.proxy_config(), re.MULTILINE)
    assert "access_log off;" in made.proxy_config()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("proxied"))
    with made.federation:
        made.start(proxy=True)
        yield made


@pytest.fixture
def deployment(started: Deployment) -> Iterator[Deployment]:
    with started.cleaned():
        yield started


class Stranger:
    """Somebody with the address and the CA certificate, and Flower's own command."""

    def __init__(self, deployment: Deployment, home: Path) -> None:
        federation = deployment.federation
        self._port = federation.proxy_port
        self._certificate = federation.ca_certificate
        self._home = home
        connection = {
            "address": f"127.0.0.1:{self._port}",
            "root-certificates": str(self._certificate),
        }
        config = {"superlink": {"default": "there", "there": connection}}
        (home / "config.toml").write_text(tomli_w.dumps(config))

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program("flwr"), *arguments],
            env={"FLWR_HOME": str(self._home), "FLWR_TELEMETRY_ENABLED": "0", "PATH": ""},
            cwd=self._home,
            capture_output=True,
            text=True,
            check=False,
        )

    def post(self, path: str, body: bytes = b"", method: str = "POST") -> int:
        """The status of a request with exactly this path."""
        context = ssl.create_default_context(cafile=str(self._certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=context)
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Content-Type", PROTOBUF_MEDIA_TYPE)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        connection.send(body)
        status = connection.getresponse().status
        connection.close()
        return status


@pytest.fixture
def stranger(deployment: Deployment, tmp_path: Path) -> Stranger:
    return Stranger(deployment, tmp_path)


@needs_nginx
@pytest.mark.deployment
def test_signatures_of_supernodes_pass_the_proxy(deployment: Deployment) -> None:
    run = deployment.begin("proxied", 2, min_online=1.0)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, "proxied", 2, {user: [1, 2] for user in USERS})
    everything = [path.read_bytes() for path in deployment.directory.glob("*nginx*.log")]
    everything.append(deployment.federation.log("proxy").encode())
    assert b"flwr-signature" not in b"".join(everything).lower()


@needs_nginx
@pytest.mark.deployment
def test_a_proxy_that_is_down_in_the_middle_of_a_round(deployment: Deployment) -> None:
    """SuperNodes try again; that round counts whoever is back in time, and θ is as ever."""
    deployment.tell(USERS[0], "hang 1")
    run = deployment.begin("down", 3, min_online=1.0)
    deployment.wait_for_visit("down", USERS[0], 1)
    deployment.federation.kill("proxy")
    deployment.release(USERS[0])
    time.sleep(15)  # so that its reply finds no proxy
    deployment.federation.start_proxy()
    assert deployment.finish(run) == "finished:completed"
    check(deployment, "down", 3)
    assert all(deployment.kept("down", user) is not None for user in USERS)


@needs_nginx
@pytest.mark.deployment
def test_a_stranger_runs_nothing_reads_nothing_and_registers_nobody(
    deployment: Deployment, stranger: Stranger, tmp_path: Path
) -> None:
    federation = deployment.federation
    runs = federation.flwr("list", "deployment", "--format", "json")
    nodes = federation.flwr("supernode", "list", "deployment", "--format", "json")
    app = write_app(tmp_path / "theft", [MODULE], COMPONENTS["message"], {"rounds": 1})
    public = make_key_pair(tmp_path / "mine")
    attempts = [
        ("run", str(app), "there"),
        ("log", "1", "there", "--show"),
        ("list", "there"),
        ("supernode", "list", "there"),
        ("supernode", "register", str(public), "there", "--name", USERS[0]),
    ]
    for attempt in attempts:
        done = stranger.flwr(*attempt)
        said = done.stdout + done.stderr
        assert done.returncode != 0 or "404" in said, (attempt, said)
        assert "server-private" not in said
    assert federation.flwr("list", "deployment", "--format", "json").count(
        '"run-id"'
    ) == runs.count('"run-id"')
    again = federation.flwr("supernode", "list", "deployment", "--format", "json")
    assert again.count('"node-id"') == nodes.count('"node-id"') == len(USERS)


@needs_nginx
@pytest.mark.deployment
def test_no_spelling_of_a_path_leads_past_the_proxy(stranger: Stranger) -> None:
    known = {path for _, path in translation.PROTOBUF_REQUEST_TYPES}
    assert {"/v1/control/start-run", "/v1/fleet/register-node"} <= known
    for path in known - passed_on():
        assert stranger.post(path) == 404, path
    tricks = [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages%00/../register-node",
        "//v1/control/start-run",
        "/V1/CONTROL/START-RUN",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/register-node?x=/v1/fleet/pull-messages",
        "https://localhost/v1/control/start-run",
        "/docs",
        "/openapi.json",
        "/",
    ]
    for path in tricks:
        assert stranger.post(path) in (400, 404), path
    assert stranger.post("/v1/control/../fleet/pull-messages") == 401, "passed on by its true name"
    for path in passed_on():
        assert stranger.post(path) == 401, f"{path} without a signature"
        assert stranger.post(path, method="GET") == 404
    assert stranger.post("/v1/fleet/push-object", bytes(17 << 20)) == 413


@needs_nginx
@pytest.mark.deployment
def test_whoever_is_not_let_in_reads_one_line_that_says_why(deployment: Deployment) -> None:
    """Through the real proxy, to a real SuperLink; whoever asks is online no more than before."""
    federation = deployment.federation
    address = f"127.0.0.1:{federation.proxy_port}"

    def ask(name: str) -> str:
        return check_connection(address, federation.ca_certificate, federation.key(name))

    assert "lets this SuperNode in" in ask(USERS[0])
    federation.public_key("eve")
    with pytest.raises(NotLetInError, match="is not registered at the SuperLink, or no longer"):
        ask("eve")
    federation.register("eve")
    assert "lets this SuperNode in" in ask("eve")
    listed = federation.flwr("supernode", "list", "deployment", "--format", "json")
    nodes = json.loads(listed)["nodes"]
    assert sorted(node["status"] for node in nodes) == ["online"] * len(USERS) + ["registered"]
    (eve,) = (node["node-id"] for node in nodes if node["status"] == "registered")
    federation.flwr("supernode", "unregister", eve, "deployment")
    with pytest.raises(NotLetInError, match="or no longer"):
        ask("eve")


@needs_nginx
@pytest.mark.deployment
def test_a_taken_name_and_a_supernode_under_another_key(deployment: Deployment) -> None:
    """Two nodes named ada: neither takes part. Enrolled by key, the second takes nobody's place.

    ada's θ is kept all the while, and goes on.
    """
    federation = deployment.federation
    ada = USERS[0]
    federation.register("mallory", name=ada)
    federation.start_supernode("mallory", deployment.node_config("mallory"))
    deployment.place("mallory").mkdir(exist_ok=True)
    shutil.copy(deployment.place(ada) / "y.npy", deployment.place("mallory"))
    wait_for("mallory", lambda: online(federation) == len(USERS) + 1)
    deployment.finish(deployment.begin("named", 1, min_online=0.5))
    problems = problems_of(deployment, "named")
    assert problems == [
        "enrolled names under which two nodes are online, so that nobody has the place: ada"
    ]
    keys = ",".join(map(federation.public_key, USERS))
    deployment.finish(deployment.begin("keyed", 1, min_online=1.0, enrolled=keys))
    (problem,) = problems_of(deployment, "keyed")
    assert re.fullmatch(r"node \d+ \(name 'ada', key:\w{64}\) is online and not .*", problem)
    check(deployment, "keyed", 1, {user: [1] for user in USERS})
    federation.stop("mallory")
    wait_for("mallory to leave", lambda: online(federation) == len(USERS))
    run = deployment.begin("named", 2, min_online=1.0)
    assert deployment.finish(run) == "finished:completed"
    check(deployment, "named", 2, {ada: [2], USERS[1]: [1, 2], USERS[2]: [1, 2]})
    assert not list(deployment.place("mallory").glob("*.jsonl")), "it was never asked"


def online(federation: Federation) -> int:
    return federation.flwr("supernode", "list", "deployment", "--format", "json").count('"online"')


def problems_of(deployment: Deployment, name: str) -> list[str]:
    """What the operator was told of in a training, besides rounds."""
    return [fact["problem"] for fact in deployment.facts(name) if "problem" in fact]
