"""One user's θ on disk: each save is a new file, complete or not there, that knows whose it is.

``STATE_DIR/run/user/`` holds the last few saves of each training and the last w that came. Which file is newest is told
by a serial number in its name, never by a clock.
"""

import difflib
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import numpy as np
from flwr.app import Context

from flwr_ppsgd import disk as durable
from flwr_ppsgd.algorithm import Vector

log = logging.getLogger("flwr.ppsgd")

STATE_DIR = "ppsgd-state-dir"  # node config: where θ is mirrored
USER = "ppsgd-user"  # node config: whose θ it is; else the partition id
RUN = "ppsgd-run"  # run config: of which training it is
UNNAMED = "unnamed-run"
FORMAT = "flwr_ppsgd theta 1"
SHARED_FORMAT = "flwr_ppsgd shared 1"
SHARED = "shared.w"
SENT = "sent.jsonl"
KEPT = 3  # after and before the last round, and one more: a server may lose its newest checkpoint too
TRAININGS = 4  # of which θ is kept under one name
PRIVATE = 0o600
NAME = re.compile(r"(\d{10})-([0-9a-f]{16})\.theta")


@dataclass(frozen=True)
class Save:
    """One file: its number, what it says about θ, and the vectors."""

    serial: int
    stamp: dict[str, Any]
    vectors: dict[str, Vector]


@dataclass(frozen=True)
class Shared:
    """w as serialised arrays, in which round it came, and what the server promised then."""

    arrays: dict[str, bytes]
    round: int
    promise: str


class Shelf:
    """Where the θ of one user in the run of one name is kept."""

    def __init__(self, root: Path, run: str, user: str) -> None:
        self.run, self.user = run, user
        self.directory = root / _folder(run) / _folder(user)

    @classmethod
    def of(cls, context: Context) -> Self | None:
        """The one that the node config names; None where θ lives in the node's state alone."""
        node = context.node_config
        for key in node:
            if key.startswith("ppsgd-") and key not in (STATE_DIR, USER):
                nearest = difflib.get_close_matches(key, [STATE_DIR, USER], n=1, cutoff=0.0)[0]
                raise ValueError(f"node config: unknown key {key!r}: did you mean {nearest!r}?")
        root, user = str(node.get(STATE_DIR, "")), str(node.get(USER, node.get("partition-id", "")))
        if not root:
            return None
        if not user:
            raise ValueError(
                f"node config: {STATE_DIR} is set and nothing says whose θ it is: add {USER}, or partition-id"
            )
        return cls(Path(root), str(context.run_config.get(RUN, "") or UNNAMED), user)

    @classmethod
    def all_in(cls, root: Path) -> list[Self]:
        """Every shelf below a state directory."""
        found = sorted({path.parent for path in root.glob("*/*/*.theta*")})
        return [cls(root, unquote(path.parent.name), unquote(path.name)) for path in found]

    def serials(self, training: int | None = None) -> list[int]:
        """Numbers of the saves, of one training or of all."""
        return [serial for serial, own in self._names() if training in (None, own)]

    def newest(self, training: int) -> int:
        """The number of the last save of a training; 0 where there is none."""
        return max(self.serials(training), default=0)

    def saves(self, of: Callable[[int], bool] = lambda _: True) -> Iterator[Save]:
        """Newest first, those of the trainings that ``of`` wants. Damaged ones are set aside, saying so."""
        for serial, training in sorted(self._names(), reverse=True):
            if of(training) and (save := self._read(serial, training)) is not None:
                yield save

    def refuse_if_all_are_damaged(self) -> None:
        """Never begin anew where there was a θ."""
        if self.damaged() and not self._names():
            raise ValueError(
                f"every save of θ of user {self.user!r} in {self.directory} is damaged: it is not begun anew unasked; "
                "restore one from a backup, or remove the directory to begin with an untrained θ"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone on this shelf; whatever fails is one line that says what to do."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                yield
        except OSError as error:
            raise OSError(
                f"θ of user {self.user!r} could not be written to {self.directory} ({error.strerror or error}): it "
                "stays as it was and this round counts as zero; free some space there, or make the directory writable"
            ) from error

    def note(self, line: Mapping[str, Any]) -> None:
        """Append to the list of what has left this machine."""
        descriptor = os.open(self.directory / SENT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def notes(self) -> Iterator[dict[str, Any]]:
        """What has left, reply by reply; a line that a crash has cut off is passed over."""
        path = self.directory / SENT
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(ValueError):
                yield json.loads(line)

    def put(self, training: int, stamp: Mapping[str, Any], vectors: Mapping[str, Vector], seen: int, base: int) -> None:
        """Save, unless ``seen`` is no longer the newest: θ has been stepped by somebody else meanwhile.

        base: the save that was stepped from. Whatever came between belongs to a round that the server has lost.
        """
        if self.newest(training) != seen:
            raise ValueError(
                f"θ of user {self.user!r} was stepped by another task while this one was at work: this step is "
                "dropped; start one SuperNode for each user"
            )
        serial = 1 + max(self.serials(), default=0)
        self._write(serial, training, stamp, vectors)
        self._prune(serial, training, base)

    def put_shared(self, arrays: Mapping[str, bytes], round_: int, promise: str) -> None:
        """Keep the w that came last, and what was promised. Both are public and can be had again: nobody waits for the
        disk."""
        sizes = {name: len(data) for name, data in arrays.items()}
        head = {"format": SHARED_FORMAT, "round": round_, "promise": promise, "arrays": sizes}
        durable.write(self.directory / SHARED, durable.seal(head, arrays.values()), mode=PRIVATE, sync=False)

    def shared(self) -> "Shared":
        """The last w that came."""
        try:
            head, data = durable.unseal((self.directory / SHARED).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"no whole w in {self.directory} ({error}): give the published one") from None
        parts = map(bytes, _cut(data, head["arrays"].values()))
        return Shared(dict(zip(head["arrays"], parts, strict=True)), head["round"], head["promise"])

    def damaged(self) -> list[Path]:
        """Files that were set aside."""
        return sorted(self.directory.glob("*.theta.damaged"))

    def _names(self) -> list[tuple[int, int]]:
        """(serial, training) of each file."""
        try:
            found = [NAME.fullmatch(name) for name in os.listdir(self.directory)]
        except FileNotFoundError:
            return []
        return [(int(match[1]), int(match[2], 16)) for match in found if match]

    def _path(self, serial: int, training: int) -> Path:
        return self.directory / f"{serial:010d}-{training:016x}.theta"

    def _read(self, serial: int, training: int) -> Save | None:
        path = self._path(serial, training)
        try:
            head, data = durable.unseal(path.read_bytes())
            if head["format"] != FORMAT:
                raise ValueError(f"format {head['format']!r}, expected {FORMAT!r}")
        except (ValueError, KeyError) as error:
            self._set_aside(path, error)
            return None
        except FileNotFoundError:  # pruned by another task a moment ago
            return None
        if (head["run"], head["user"]) != (self.run, self.user):
            raise ValueError(
                f"{path} holds the θ of user {head['user']!r} in run {head['run']!r}, not that of {self.user!r} in "
                f"{self.run!r}: nothing was read from it; put the right file back"
            )
        parts = _cut(data, (8 * size for size in head["vectors"].values()))
        vectors = {name: np.frombuffer(part) for name, part in zip(head["vectors"], parts, strict=True)}
        return Save(serial, head["stamp"], vectors)

    def _write(self, serial: int, training: int, stamp: Mapping[str, Any], vectors: Mapping[str, Vector]) -> None:
        numbers = {name: np.ascontiguousarray(vector, dtype=np.float64) for name, vector in vectors.items()}
        head = {
            "format": FORMAT,
            "run": self.run,
            "user": self.user,
            "stamp": stamp,
            "vectors": {name: vector.size for name, vector in numbers.items()},
        }
        parts = durable.seal(head, [vector.data.cast("B") for vector in numbers.values()])
        durable.write(self._path(serial, training), parts, mode=PRIVATE)

    def _prune(self, serial: int, training: int, base: int) -> None:
        """Leave the new save, the ones that it goes back to, and the last of other trainings."""
        names = sorted(self._names(), reverse=True)
        own = [number for number, name in names if name == training and number <= base][: KEPT - 1]
        recent = list(dict.fromkeys(name for _, name in names))[:TRAININGS]
        for number, name in names:
            if number != serial and (name not in recent or (name == training and number not in own)):
                self._path(number, name).unlink(missing_ok=True)
        for partial in self.directory.glob("*.theta.partial"):
            partial.unlink(missing_ok=True)

    def _set_aside(self, path: Path, error: Exception) -> None:
        log.error("%s is damaged (%s): set aside, θ goes on from the save before", path, error)
        try:
            os.replace(path, path.with_name(path.name + ".damaged"))
        except OSError as failure:
            log.error("%s could not be renamed: %s", path, failure)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _cut(data: memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _folder(name: str) -> str:
    """Any name as that of a folder; ``unquote`` gives it back."""
    return quote(name, safe=" ").replace(".", "%2E")
