"""SuperLink and SuperNodes as processes of this machine, with certificates and keys of their own.

Nothing here is about PPSGD. Every process that is started is stopped by its id, with whatever it
has started itself. A SuperNode that ends by itself is started again, as an operator would have
systemd do: for up to a minute after a SuperNode was killed, Flower still takes it to be online and
turns its key away.
"""

import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CONNECTION = "deployment"
PROXY_CONFIG = Path(__file__).with_name("nginx.conf")
PATIENCE = 1800.0  # seconds: far more than anything takes, however busy the machine is
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the plugin is there already
}


class Federation:
    """One SuperLink with a database, TLS and SuperNode authentication; SuperNodes by name.

    secure: whether there are TLS and authentication; without, whoever looks at the packets can read
    them.
    """

    def __init__(self, directory: Path, *, secure: bool = True) -> None:
        self.directory = directory.resolve()
        self._secure = secure
        self.port, self.proxy_port = free_ports(2)
        self._entrance = self.port  # where SuperNodes connect
        self._keys = self.directory / "keys"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._configs: dict[str, str] = {}
        # how to start again what should be running
        self._commands: dict[str, Callable[[], None]] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._keys.mkdir(parents=True, exist_ok=True)
        make_certificates(self._keys)
        self._write_connection()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # nothing is started again meanwhile
            self._closed = True
            for name in list(self._processes):
                self.kill(name)

    def start_superlink(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it, or start it again with the same database, and wait until it answers."""
        keys = self._keys
        certificates = [
            "--ssl-certfile",
            keys / "server.crt",
            "--ssl-keyfile",
            keys / "server.key",
            "--ssl-ca-certfile",
            keys / "ca.crt",
            "--enable-supernode-auth",
        ]
        protection = certificates if self._secure else ["--insecure"]
        command = [
            "flower-superlink",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--database",
        ]
        self._start(
            "superlink", [*command, self.directory / "superlink.db", *protection], environment
        )
        wait_for("the SuperLink to answer", lambda: _answers(self.port))

    def start_proxy(self) -> None:
        """nginx between SuperNodes and SuperLink, which lets nothing else through.

        SuperNodes that are started from now on connect to it.
        """
        config = self.directory / "nginx.conf"
        config.write_text(self.proxy_config())
        errors = self.directory / "nginx-error.log"
        command = ["nginx", "-p", self.directory, "-e", errors, "-c", config, "-g", "daemon off;"]
        self._start("proxy", command, None)
        self._commands["proxy"] = lambda: self._start("proxy", command, None)
        wait_for("the proxy to answer", lambda: _answers(self.proxy_port))
        self._entrance = self.proxy_port

    def proxy_config(self) -> str:
        """``nginx.conf`` for this federation."""
        words = {
            "LISTEN": f"127.0.0.1:{self.proxy_port}",
            "SUPERLINK": f"127.0.0.1:{self.port}",
            "SUPERLINK_NAME": "localhost",
            "CA": self._keys / "ca.crt",
            "CERTIFICATE": self._keys / "server.crt",
            "KEY": self._keys / "server.key",
            "DIRECTORY": self.directory,
        }
        text = PROXY_CONFIG.read_text(encoding="utf-8")
        head, _, body = text.partition("\npid ")
        for word, value in words.items():
            body = body.replace(f"@{word}@", str(value))
        return f"{head}\npid {body}"

    def register(self, key: str, name: str | None = None) -> None:
        """Register the public key of a SuperNode.

        Args:
            key: of the SuperNode that is called so here.
            name: under which it is registered; None: the same.
        """
        self.public_key(key)
        public = str(self._keys / f"{key}.pub")
        named = ["--name", name or key, "--format", "json"]
        out = self.flwr("supernode", "register", public, CONNECTION, *named)
        if not json.loads(out).get("success"):
            raise RuntimeError(f"SuperNode {key} could not be registered: {out}")

    def key(self, name: str) -> Path:
        """Where the private key of a SuperNode is."""
        return self._keys / name

    def public_key(self, name: str) -> str:
        """That of a SuperNode, as ``ssh-keygen`` writes it; its key pair is made on first use."""
        public = self._keys / f"{name}.pub"
        if not public.exists():
            make_key_pair(self._keys / name)
        return public.read_text()

    def start_supernode(
        self,
        name: str,
        config: Mapping[str, str | int] | None = None,
        *,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, or start it again as it was.

        Args:
            name: of the SuperNode.
            config: its node config; None: as before.
            port: to connect to, if it is neither the proxy's nor the SuperLink's.
            environment: more variables.
        """
        if config is not None:
            self._configs[name] = " ".join(
                f"{key}={json.dumps(value)}" for key, value in config.items()
            )
        identity = [
            "--root-certificates",
            self._keys / "ca.crt",
            "--auth-supernode-private-key",
            self._keys / name,
        ]
        command = [
            "flower-supernode",
            "--superlink",
            f"127.0.0.1:{port or self._entrance}",
            "--port",
            str(free_ports(1)[0]),
            "--node-config",
            self._configs[name],
            *(identity if self._secure else ["--insecure"]),
        ]
        self._start(name, command, environment)
        self._commands[name] = lambda: self._start(name, command, environment)

    @property
    def ca_certificate(self) -> Path:
        """What every client has, and so every stranger may have."""
        return self._keys / "ca.crt"

    def restore(self, names: Sequence[str]) -> None:
        """End all processes but these and the proxy, and start those that are not running."""
        for name in self._processes.keys() - {*names, "proxy"}:
            self.kill(name)
        for name in names:
            process = self._processes.get(name)
            if process is not None and process.poll() is None:
                continue
            if name == "superlink":
                self.start_superlink()
            else:
                self.start_supernode(name)
        if self._entrance == self.proxy_port and "proxy" not in self._processes:
            self.start_proxy()

    def stop(self, name: str) -> None:
        """As an operator would, or a machine that shuts down: SIGTERM."""
        self._end(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """As a power cut would: SIGKILL, to whatever it has started too."""
        self._end(name, signal.SIGKILL)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def run(self, app: Path, changes: str = "") -> int:
        """``flwr run``; the id of the run."""
        more = ["--run-config", changes] if changes else []
        out = self.flwr("run", str(app), CONNECTION, "--format", "json", *more)
        answer = json.loads(out)
        if "run-id" not in answer:
            raise RuntimeError(f"flwr run started nothing: {answer}")
        return int(answer["run-id"])

    def status(self, run: int) -> str:
        """``running``, ``finished:completed``, …; ``flwr run`` itself ends with 0 even if the run
        fails."""
        listing = json.loads(
            self.flwr("list", CONNECTION, "--run-id", str(run), "--format", "json")
        )
        return str(listing["runs"][0]["status"])

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def flwr(self, *arguments: str) -> str:
        """The ``flwr`` command; what it printed."""
        done = subprocess.run(
            [program("flwr"), *arguments],
            env=self._environment("cli"),
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        if done.returncode:
            raise RuntimeError(
                f"flwr {arguments[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def _start(
        self, name: str, command: Sequence[object], environment: Mapping[str, str] | None
    ) -> None:
        line = [program(str(command[0])), *map(str, command[1:])]
        with self._lock, (self.directory / f"{name}.log").open("ab") as log:
            if self._closed:
                return
            self._processes[name] = subprocess.Popen(
                line,
                env={**self._environment(name), **(environment or {})},
                cwd=self.directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _end(self, name: str, how: signal.Signals) -> None:
        with self._lock:
            self._commands.pop(name, None)
            process = self._processes.pop(name)
        if how is not signal.SIGKILL:
            process.send_signal(how)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        _sweep(process, self._home(name))

    def _watch(self) -> None:
        """Start again whatever has ended by itself."""
        while not self._closed:
            time.sleep(2)
            with self._lock:
                for name, start in list(self._commands.items()):
                    if self._processes[name].poll() is not None:
                        _sweep(self._processes[name], self._home(name))
                        start()

    def _home(self, name: str) -> Path:
        return self.directory / "homes" / name

    def _environment(self, name: str) -> dict[str, str]:
        home = self._home(name)
        home.mkdir(parents=True, exist_ok=True)
        path = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", "")
        return {**os.environ, **FLOWER, "FLWR_HOME": str(home), "PATH": path}

    def _write_connection(self) -> None:
        home = Path(self._environment("cli")["FLWR_HOME"])
        trust = (
            {"root-certificates": str(self._keys / "ca.crt")}
            if self._secure
            else {"insecure": True}
        )
        connection = {"address": f"127.0.0.1:{self.port}", **trust}
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        (home / "config.toml").write_text(tomli_w.dumps(config))


def has_nginx() -> bool:
    """Whether nginx can be started here."""
    return shutil.which("nginx", path=_SEARCH) is not None


def _sweep(process: subprocess.Popen[bytes], home: Path) -> None:
    """Kill a process, its session, and what it has started in sessions of their own.

    Flower's ``flower-superexec`` is such a one. All of them know the home that only this process
    was given.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := _at_home(home):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _at_home(home: Path) -> list[int]:
    """The processes with this Flower home; none where there is no /proc to tell."""
    wanted = f"FLWR_HOME={home}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def write_app(
    directory: Path,
    modules: Sequence[Path],
    components: Mapping[str, str],
    config: Mapping[str, Any],
) -> Path:
    """What ``flwr run`` needs: a pyproject.toml and the modules that hold the apps.

    Args:
        directory: where the app goes; its name is the app's.
        modules: Python files to copy.
        components: ``serverapp`` and ``clientapp`` as ``module:name``.
        config: the run config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for module in modules:
        shutil.copy(module, directory / module.name)
    about = {
        "name": directory.name,
        "version": "1.0.0",
        "description": "PPSGD",
        "license": "Apache-2.0",
        "dependencies": ["flwr-ppsgd"],
    }
    app = {"publisher": "flwr-ppsgd", "components": dict(components), "config": dict(config)}
    project = {"project": about, "tool": {"flwr": {"app": app}}}
    (directory / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return directory


def wait_for(what: str, happened: Callable[[], bool]) -> None:
    """Look again and again; RuntimeError if it does not happen in half an hour."""
    deadline = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        if happened():
            return
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError(f"waited {PATIENCE:g} s in vain for {what}")
        # a look may start a process of Flower's: most of the time is for those who are waited for
        time.sleep(max(0.5, 2 * (now - began)))


def make_key_pair(path: Path) -> Path:
    """A key as ``ssh-keygen -t ecdsa -b 384`` makes it; where the public half is."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    path.chmod(0o600)
    public = path.with_suffix(".pub")
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return public


def make_certificates(directory: Path, *, authority_age: int = 1, server_age: int = 1) -> None:
    """A certificate authority, and a certificate of it for a server on the loopback address.

    Args:
        directory: where they go, with the server's key.
        authority_age: days for which the authority's is valid already, of a year and a day.
        server_age: the same for the server's.
    """
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name, server_name = _name("PPSGD example authority"), _name("127.0.0.1")
    ca = _certificate(
        ca_name,
        ca_key.public_key(),
        ca_name,
        ca_key,
        x509.BasicConstraints(ca=True, path_length=0),
        authority_age,
    )
    loopback = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    )
    server = _certificate(
        server_name, server_key.public_key(), ca_name, ca_key, loopback, server_age
    )
    (directory / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (directory / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    (directory / "server.key").write_bytes(_private(server_key, serialization.PrivateFormat.PKCS8))
    (directory / "server.key").chmod(0o600)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def program(name: str) -> str:
    """Beside this Python, where an installation puts it, or else wherever it is found."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    return shutil.which(name, path=_SEARCH) or str(beside)


def _certificate(  # noqa: PLR0917 - one for each field
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
    age: int,
) -> x509.Certificate:
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=366))
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        .sign(signer, hashes.SHA256())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _answers(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0
