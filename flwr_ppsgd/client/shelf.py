"""One user's θ on disk: each save is a new file, complete or not there, that knows whose it is.

``STATE_DIR/run/user/`` holds the last few saves of each training and the last w that came. Which
file is newest is told by a serial number in its name, never by a clock.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import numpy as np
from flwr.app import Context

from flwr_ppsgd import disk
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import nearest

log = logging.getLogger("flwr.ppsgd")

STATE_DIR = "ppsgd-state-dir"  # node config: where θ is mirrored
USER = "ppsgd-user"  # node config: whose θ it is; else the partition id
RUN = "ppsgd-run"  # run config: of which training it is
UNNAMED = "unnamed-run"
FORMAT = "flwr_ppsgd theta 1"
SHARED_FORMAT = "flwr_ppsgd shared 1"
SHARED = "shared.w"
SENT = "sent.jsonl"
LOCK = "lock"
KEPT = 3  # after and before the last round, and one more: a server may lose its newest checkpoint
TRAININGS = 4  # of which θ is kept under one name
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
    """Where the θ of one user in the run of one name is kept.

    Args:
        root: the state directory.
        run: the name of the run.
        user: the name of the user.
    """

    def __init__(self, root: Path, run: str, user: str) -> None:
        self.run = run
        self.user = user
        self.directory = root / _folder(run) / _folder(user)

    @classmethod
    def of(cls, context: Context) -> Self | None:
        """The one that the node config names; None if θ lives in the node's state alone."""
        node = context.node_config
        for key in node:
            if key.startswith("ppsgd-") and key not in (STATE_DIR, USER):
                meant = nearest(key, (STATE_DIR, USER))
                raise ValueError(f"node config: unknown key {key!r}: did you mean {meant!r}?")
        root = str(node.get(STATE_DIR, ""))
        if not root:
            return None
        user = str(node.get(USER, node.get("partition-id", "")))
        if not user:
            raise ValueError(
                f"node config: {STATE_DIR} is set and nothing says whose θ it is: add {USER}, or "
                "partition-id"
            )
        run = str(context.run_config.get(RUN, "")) or UNNAMED
        return cls(Path(root), run, user)

    @classmethod
    def all_in(cls, root: Path) -> list[Self]:
        """Every shelf below a state directory."""
        found = sorted({path.parent for path in root.glob("*/*/*.theta*")})
        return [cls(root, unquote(path.parent.name), unquote(path.name)) for path in found]

    def serials(self, training: int | None = None) -> list[int]:
        """Numbers of the saves, of one training or of all."""
        return [serial for serial, own in self._names() if training in (None, own)]

    def newest(self, training: int) -> int:
        """The number of the last save of a training; 0 if there is none."""
        return max(self.serials(training), default=0)

    def saves(self, of: Callable[[int], bool] = lambda _: True) -> Iterator[Save]:
        """The saves, newest first. Damaged ones are set aside, saying so.

        Args:
            of: says of which trainings.
        """
        for serial, training in sorted(self._names(), reverse=True):
            if not of(training):
                continue
            save = self._read(serial, training)
            if save is not None:
                yield save

    def refuse_if_all_are_damaged(self) -> None:
        """Never begin anew if there was a θ."""
        if self.damaged() and not self._names():
            raise ValueError(
                f"every save of θ of user {self.user!r} in {self.directory} is damaged: it is not "
                "begun anew unasked; restore one from a backup, or remove the directory to begin "
                "with an untrained θ"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone on this shelf; whatever fails is one line that says what to do."""
        try:
            self.directory.mkdir(mode=disk.PRIVATE_FOLDER, parents=True, exist_ok=True)
            with disk.locked(self.directory / LOCK, mode=disk.PRIVATE_FILE):
                yield
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"θ of user {self.user!r} could not be written to {self.directory} ({reason}): it "
                "stays as it was and this round counts as zero; free some space there, or make the "
                "directory writable"
            ) from error

    def note(self, line: Mapping[str, Any]) -> None:
        """Append to the list of what has left this machine."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self.directory / SENT, flags, disk.PRIVATE_FILE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def notes(self) -> Iterator[dict[str, Any]]:
        """What has left, reply by reply; a line that a crash has cut off is left out."""
        path = self.directory / SENT
        if not path.exists():
            return
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)

    def put(
        self,
        training: int,
        stamp: Mapping[str, Any],
        vectors: Mapping[str, Vector],
        seen: int,
        base: int,
    ) -> None:
        """Save, unless somebody else has stepped θ meanwhile.

        Args:
            training: the server's training.
            stamp: what is said about θ.
            vectors: θ, and Σ θ_t if it is kept.
            seen: the newest save when θ was read.
            base: the save that was stepped from. Whatever came between belongs to a round that the
                server has lost.
        """
        if self.newest(training) != seen:
            raise ValueError(
                f"θ of user {self.user!r} was stepped by another task while this one was at work: "
                "this step is dropped; start one SuperNode for each user"
            )
        serial = 1 + max(self.serials(), default=0)
        self._write(serial, training, stamp, vectors)
        self._prune(serial, training, base)

    def put_shared(self, arrays: Mapping[str, bytes], round_: int, promise: str) -> None:
        """Keep the w that came last, and what was promised.

        Both are public and can be had again: nobody waits for the disk.
        """
        sizes = {name: len(data) for name, data in arrays.items()}
        head = {"format": SHARED_FORMAT, "round": round_, "promise": promise, "arrays": sizes}
        content = disk.seal(head, arrays.values())
        disk.write(self.directory / SHARED, content, mode=disk.PRIVATE_FILE, sync=False)

    def shared(self) -> Shared:
        """The last w that came."""
        path = self.directory / SHARED
        try:
            head, data = disk.unseal(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no whole w in {self.directory} ({error}): give the published one"
            ) from None
        sizes = head["arrays"]
        parts = disk.cut(data, sizes.values())
        arrays = {name: bytes(part) for name, part in zip(sizes, parts, strict=True)}
        return Shared(arrays, head["round"], head["promise"])

    def damaged(self) -> list[Path]:
        """Files that were set aside."""
        return sorted(self.directory.glob("*.theta.damaged"))

    def _names(self) -> list[tuple[int, int]]:
        """(serial, training) of each file."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        matches = [NAME.fullmatch(name) for name in names]
        return [(int(match[1]), int(match[2], 16)) for match in matches if match]

    def _path(self, serial: int, training: int) -> Path:
        return self.directory / f"{serial:010d}-{training:016x}.theta"

    def _read(self, serial: int, training: int) -> Save | None:
        path = self._path(serial, training)
        try:
            head, data = disk.unseal(path.read_bytes())
            if head["format"] != FORMAT:
                raise ValueError(f"format {head['format']!r}, expected {FORMAT!r}")
        except FileNotFoundError:  # pruned by another task a moment ago
            return None
        except (ValueError, KeyError) as error:
            self._set_aside(path, error)
            return None
        if (head["run"], head["user"]) != (self.run, self.user):
            raise ValueError(
                f"{path} holds the θ of user {head['user']!r} in run {head['run']!r}, not that of "
                f"{self.user!r} in {self.run!r}: nothing was read from it; put the right file back"
            )
        sizes = head["vectors"]
        parts = disk.cut(data, [8 * size for size in sizes.values()])
        vectors = {name: np.frombuffer(part) for name, part in zip(sizes, parts, strict=True)}
        return Save(serial, head["stamp"], vectors)

    def _write(
        self,
        serial: int,
        training: int,
        stamp: Mapping[str, Any],
        vectors: Mapping[str, Vector],
    ) -> None:
        numbers = {
            name: np.ascontiguousarray(vector, dtype=np.float64) for name, vector in vectors.items()
        }
        head = {
            "format": FORMAT,
            "run": self.run,
            "user": self.user,
            "stamp": stamp,
            "vectors": {name: vector.size for name, vector in numbers.items()},
        }
        content = disk.seal(head, [vector.data.cast("B") for vector in numbers.values()])
        disk.write(self._path(serial, training), content, mode=disk.PRIVATE_FILE)

    def _prune(self, serial: int, training: int, base: int) -> None:
        """Leave the new save, the ones that it goes back to, and the last of other trainings."""
        names = sorted(self._names(), reverse=True)
        history = [number for number, own in names if own == training and number <= base]
        kept = {serial, *history[: KEPT - 1]}
        trainings = list(dict.fromkeys(own for _, own in names))
        recent = trainings[:TRAININGS]
        for number, own in names:
            needed = number in kept if own == training else own in recent
            if not needed:
                self._path(number, own).unlink(missing_ok=True)
        for partial in self.directory.glob("*.theta.partial"):
            partial.unlink(missing_ok=True)

    def _set_aside(self, path: Path, error: Exception) -> None:
        log.error("%s is damaged (%s): set aside, θ goes on from the save before", path, error)
        try:
            os.replace(path, path.with_name(path.name + ".damaged"))
        except OSError as failure:
            log.error("%s could not be renamed: %s", path, failure)


def _folder(name: str) -> str:
    """Any name as that of a folder; ``unquote`` gives it back."""
    return quote(name, safe=" ").replace(".", "%2E")
