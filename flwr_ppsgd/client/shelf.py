"""One user's θ on disk: each save is a new file, complete or not there, that knows whose it is.

``STATE_DIR/run/user/`` holds the last few saves of each training and the last w that came. Which
file is newest is told by a serial number in its name, never by a clock.
"""

import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote, unquote

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_ppsgd import disk
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.policy import STATE_DIR, USER
from flwr_ppsgd.client.refusal import (
    NODE_CONFIG,
    THETA_BUSY,
    THETA_DAMAGED,
    THETA_FOREIGN,
    DiskError,
    RefusedError,
)

log = logging.getLogger("flwr.ppsgd")

RUN = "ppsgd-run"  # run config: the name under which trainings share one θ
NO_TRAINING = "no-training"  # for messages without an Order
FORMAT = "flwr_ppsgd theta 2"
SHARED_FORMAT = "flwr_ppsgd shared 1"
MODEL = "model"  # the personal model of the recipe
SHARED = "shared.w"
SENT = "sent.jsonl"
MEMORY = "secure.memory"  # of secure sums: their terms, and which rounds were answered
MEMORY_FORMAT = "flwr_ppsgd secure 1"
LOCK = "lock"
KEPT = 3  # saves of a training at least, in case the newest one is damaged
TRAININGS = 4  # of which θ is kept under one name
DAMAGED = ".damaged"
NAME = re.compile(r"(\d{10})-([0-9a-f]{16})-(\d+)\.theta")
LONGEST_FOLDER = 200  # bytes; file systems take 255
HASHED = "+"  # never in a name that is quoted whole


class Name(NamedTuple):
    """What the name of a file says: its number, the training, the round."""

    serial: int
    training: int
    round: int
    file: str

    @classmethod
    def read(cls, file: str) -> "Name | None":
        """What a name says; None if it is not that of a save."""
        match = NAME.fullmatch(file)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2], 16), int(match[3]), file)

    @classmethod
    def new(cls, serial: int, training: int, round_: int) -> "Name":
        """The name of a save that is to be written."""
        file = f"{serial:010d}-{training:016x}-{round_}.theta"
        return cls(serial, training, round_, file)


@dataclass(frozen=True)
class Save:
    """One file: its number, its training, what it says about θ, and the vectors."""

    serial: int
    training: int
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
        named: whether somebody chose the run's name, so that a new training goes on with the θ of
            the last one there.
    """

    def __init__(self, root: Path, run: str, user: str, *, named: bool = True) -> None:
        self.root = root
        self.run = run
        self.user = user
        self.named = named
        self.directory = root / _folder(run) / _folder(user)

    @classmethod
    def of(cls, context: Context, training: int) -> Self | None:
        """The one that the node config names; None if θ lives in the node's state alone.

        Args:
            context: the node.
            training: the server's training, by which a run without a name is known; 0 if there is
                none.
        """
        place = owner_of(context)
        if place is None:
            return None
        root, user = place
        run = str(context.run_config.get(RUN, ""))
        if run:
            return cls(root, run, user)
        return cls(root, run_of(training), user, named=False)

    @classmethod
    def all_in(cls, root: Path) -> list[Self]:
        """Every shelf below a state directory."""
        files = [*root.glob("*/*/*.theta*"), *root.glob(f"*/*/{SENT}")]
        directories = sorted({path.parent for path in files})
        return [cls._at(root, directory) for directory in directories]

    @classmethod
    def only(cls, root: Path, user: str, run: str | None = None) -> Self | None:
        """The shelf with the θ of a user; None if there is none, ValueError if there are several.

        Args:
            root: the state directory.
            user: the name of the user.
            run: the name of the run; needed only if the user took part in more than one.
        """
        of_user = [shelf for shelf in cls.all_in(root) if shelf.user == user]
        of_run = [shelf for shelf in of_user if run in (None, shelf.run)]
        found = [shelf for shelf in of_run if shelf.holds_theta()]
        if len(found) > 1:
            runs = [shelf.run for shelf in found]
            raise ValueError(f"user {user!r} took part in {runs}: name one with run=, or {RUN}")
        return found[0] if found else None

    @classmethod
    def _at(cls, root: Path, directory: Path) -> Self:
        run = unquote(directory.parent.name)
        user = unquote(directory.name)
        if HASHED in str(directory.relative_to(root)):
            head = _any_head(directory)
            run = head.get("run", run)
            user = head.get("user", user)
        shelf = cls(root, run, user)
        shelf.directory = directory
        return shelf

    def holds_theta(self) -> bool:
        """Whether θ was ever saved here, be it damaged now."""
        return bool(self._names() or self._names(DAMAGED))

    def serials(self, training: int | None = None) -> list[int]:
        """Numbers of the saves, of one training or of all."""
        return [name.serial for name in self._names() if training in (None, name.training)]

    def newest(self, training: int) -> int:
        """The number of the last save of a training; 0 if there is none."""
        return max(self.serials(training), default=0)

    def saves(self, of: Callable[[int], bool] = lambda _: True) -> Iterator[Save]:
        """The saves, newest first. Damaged ones are set aside, saying so.

        Args:
            of: says of which trainings.
        """
        for name in sorted(self._names(), reverse=True):
            if not of(name.training):
                continue
            save = self._read(name)
            if save is not None:
                yield save

    def last(self) -> Save | None:
        """The newest save of all trainings; None if nothing was ever saved."""
        save = next(self.saves(), None)
        self.refuse_to_fall_back(save)
        return save

    def refuse_to_fall_back(self, save: Save | None, training: int | None = None) -> None:
        """Neither θ of another training nor a new one takes the place of damaged saves.

        Args:
            save: the θ to go on with; None for a new one.
            training: the training that has no whole save; None if any will do.
        """
        any_training = self.named or training is None
        for name in self._names(DAMAGED):
            own = name.training == training
            if own or (any_training and _comes_after(name, save)):
                raise RefusedError(
                    THETA_DAMAGED,
                    f"saves of θ of user {self.user!r} in {self.directory} are damaged and no "
                    f"whole one of training {name.training:016x} is left: it is not begun anew "
                    f"unasked; restore one from a backup, or remove the files *{DAMAGED} to go on "
                    "without",
                )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone on this shelf; whatever fails is one line that says what to do."""
        try:
            self._make_private()
            with disk.locked(self.directory / LOCK, mode=disk.PRIVATE_FILE):
                yield
        except OSError as error:
            reason = error.strerror or error
            raise DiskError(
                f"θ of user {self.user!r} could not be written to {self.directory} ({reason}): it "
                "stays as it was and this round counts as zero; free some space there, or make the "
                "directory writable"
            ) from error

    def _make_private(self) -> None:
        """For the owner alone, also if others could look before."""
        disk.make_private(self.directory)
        for directory in (self.directory.parent, self.directory):
            if directory.stat().st_mode & 0o077:
                directory.chmod(disk.PRIVATE_FOLDER)

    def note(self, line: Mapping[str, Any]) -> int:
        """Append to the list of what has left this machine; returns its length before.

        A line that a crash has cut off is ended first.
        """
        text = json.dumps(line).encode() + b"\n"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self.directory / SENT, flags, disk.PRIVATE_FILE)
        try:
            length = os.fstat(descriptor).st_size
            if length and os.pread(descriptor, 1, length - 1) != b"\n":
                text = b"\n" + text
            if os.write(descriptor, text) != len(text):
                os.ftruncate(descriptor, length)
                raise OSError("the disk took only part of a line")
        finally:
            os.close(descriptor)
        return length

    @contextmanager
    def noted(self, line: Mapping[str, Any]) -> Iterator[None]:
        """Note what leaves, before the block; taken back if the block fails."""
        length = self.note(line)
        try:
            yield
        except BaseException:
            os.truncate(self.directory / SENT, length)
            raise

    def notes(self) -> Iterator[dict[str, Any]]:
        """What has left, reply by reply; a line that a crash has cut off is left out."""
        path = self.directory / SENT
        if not path.exists():
            return
        for line in path.read_bytes().split(b"\n"):
            note = _note(line)
            if note is not None:
                yield note

    def memory(self) -> dict[str, Any]:
        """What is remembered of secure sums, by training; a damaged file is refused."""
        path = self.directory / MEMORY
        if not path.exists():
            return {}
        try:
            head, _ = disk.unseal(path.read_bytes())
            found: dict[str, Any] = head["trainings"]
        except OSError as error:
            raise self._unreadable(error) from None
        except (ValueError, KeyError) as error:
            raise RefusedError(
                THETA_DAMAGED,
                f"{path} is damaged ({error}), so it is not known which rounds were answered: "
                "nothing is sent; restore it from a backup, or remove it if this node takes part "
                "in no training any more",
            ) from None
        return found

    def put_memory(self, trainings: Mapping[str, Any]) -> None:
        """Replace what is remembered; when this returns, it is on the disk."""
        head = {"format": MEMORY_FORMAT, "trainings": dict(trainings)}
        disk.write(self.directory / MEMORY, disk.seal(head, []), mode=disk.PRIVATE_FILE)

    def refuse_if_busy(self, training: int, seen: int) -> None:
        """Refuse if somebody else has stepped θ meanwhile.

        Args:
            training: the server's training.
            seen: the newest save when θ was read.
        """
        if self.newest(training) != seen:
            raise RefusedError(
                THETA_BUSY,
                f"θ of user {self.user!r} was stepped by another task while this one was at work: "
                "this step is dropped; start one SuperNode for each user",
            )

    def put(  # noqa: PLR0917
        self,
        training: int,
        stamp: Mapping[str, Any],
        vectors: Mapping[str, Vector],
        seen: int,
        base: int,
        back: int = 0,
    ) -> None:
        """Save, unless somebody else has stepped θ meanwhile.

        Args:
            training: the server's training.
            stamp: what is said about θ.
            vectors: θ, and Σ θ_t if it is kept.
            seen: the newest save when θ was read.
            base: the save that was stepped from. Whatever came between belongs to a round that the
                server has lost.
            back: the number of rounds that the server may go back.
        """
        self.refuse_if_busy(training, seen)
        names = [*self._names(), *self._names(DAMAGED)]
        last = max((name.serial for name in names), default=0)
        name = Name.new(last + 1, training, int(stamp["round"]))
        self._write(name, stamp, vectors)
        self._prune(name, base, back)

    def put_shared(self, arrays: Mapping[str, bytes], round_: int, promise: str) -> None:
        """Keep the w that came last, and what was promised.

        Both are public and can be had again: nobody waits for the disk.
        """
        sizes = {name: len(data) for name, data in arrays.items()}
        head = {"format": SHARED_FORMAT, "round": round_, "promise": promise, "arrays": sizes}
        content = disk.seal(head, arrays.values())
        disk.write(self.directory / SHARED, content, mode=disk.PRIVATE_FILE, sync=False)

    def put_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the personal model that follows from the last w; it holds the user's own rows."""
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **arrays)
        head = {"format": SHARED_FORMAT}
        content = disk.seal(head, [stream.getvalue()])
        disk.write(self.directory / MODEL, content, mode=disk.PRIVATE_FILE)

    def model(self) -> dict[str, NDArray[Any]] | None:
        """The personal model; None if the last w has not come yet."""
        path = self.directory / MODEL
        if not path.exists():
            return None
        _, data = disk.unseal(path.read_bytes())
        with np.load(io.BytesIO(data)) as arrays:
            return dict(arrays)

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
        return sorted(self.directory.glob(f"*.theta{DAMAGED}"))

    def _names(self, suffix: str = "") -> list[Name]:
        """What the names of the saves say; ``suffix`` DAMAGED for those that were set aside."""
        try:
            files = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error
        ending = [file.removesuffix(suffix) for file in files if file.endswith(suffix)]
        names = [Name.read(file) for file in ending]
        return [name for name in names if name is not None]

    def _read(self, name: Name) -> Save | None:
        path = self.directory / name.file
        try:
            head, data = disk.unseal(path.read_bytes())
            if head["format"] != FORMAT:
                raise ValueError(f"format {head['format']!r}, expected {FORMAT!r}")
        except FileNotFoundError:  # pruned by another task a moment ago
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        except (ValueError, KeyError, TypeError) as error:
            self._set_aside(path, error)
            return None
        if (head["run"], head["user"]) != (self.run, self.user):
            raise RefusedError(
                THETA_FOREIGN,
                f"{path} holds the θ of user {head['user']!r} in run {head['run']!r}, not that of "
                f"{self.user!r} in {self.run!r}: nothing was read from it; put the right file back",
            )
        sizes = head["vectors"]
        parts = disk.cut(data, [8 * size for size in sizes.values()])
        vectors = {key: np.frombuffer(part) for key, part in zip(sizes, parts, strict=True)}
        return Save(name.serial, name.training, head["stamp"], vectors)

    def _write(self, name: Name, stamp: Mapping[str, Any], vectors: Mapping[str, Vector]) -> None:
        numbers = {
            key: np.ascontiguousarray(vector, dtype=np.float64) for key, vector in vectors.items()
        }
        head = {
            "format": FORMAT,
            "run": self.run,
            "user": self.user,
            "stamp": stamp,
            "vectors": {key: vector.size for key, vector in numbers.items()},
        }
        content = disk.seal(head, [vector.data.cast("B") for vector in numbers.values()])
        disk.write(self.directory / name.file, content, mode=disk.PRIVATE_FILE)

    def _prune(self, new: Name, base: int, back: int) -> None:
        """Leave the new save, the ones that the server may go back to, and the last of other
        trainings."""
        names = sorted(self._names(), reverse=True)
        history = [name for name in names if name.training == new.training and name.serial <= base]
        needed = needed_before(new.round, [name.round for name in history], back)
        kept = {new, *history[: max(KEPT - 1, needed)]}
        trainings = list(dict.fromkeys(name.training for name in names))
        recent = trainings[:TRAININGS]
        for name in names:
            own = name.training == new.training
            stays = name in kept if own else name.training in recent
            if not stays:
                (self.directory / name.file).unlink(missing_ok=True)
        for partial in self.directory.glob("*.theta.partial"):
            partial.unlink(missing_ok=True)

    def _unreadable(self, error: OSError) -> DiskError:
        reason = error.strerror or error
        return DiskError(
            f"θ of user {self.user!r} could not be read from {self.directory} ({reason}): this "
            "round counts as zero; make the directory readable"
        )

    def _set_aside(self, path: Path, error: Exception) -> None:
        log.error("%s is damaged (%s): set aside, θ goes on from the save before", path, error)
        try:
            os.replace(path, path.with_name(path.name + DAMAGED))
        except OSError as failure:
            log.error("%s could not be renamed: %s", path, failure)


def _comes_after(damaged: Name, save: Save | None) -> bool:
    """Whether a damaged save is of a training that was at work after the one of ``save``."""
    if save is None:
        return True
    return damaged.serial > save.serial and damaged.training != save.training


def needed_before(newest: int, rounds: Iterable[int], back: int) -> int:
    """How many saves before the newest must stay, so that the server may go back ``back`` rounds.

    All of the last ``back`` rounds, and the last one before them: it is what is stepped if all of
    those rounds come again.

    Args:
        newest: the round of the newest save.
        rounds: of the saves before it, newest first.
        back: the number of rounds that the server may go back.
    """
    if not back:
        return 0
    recent = [round_ for round_ in rounds if round_ > newest - back]
    return len(recent) + 1


def owner_of(context: Context) -> tuple[Path, str] | None:
    """The state directory and the user that a node config names; None without a directory."""
    node = context.node_config
    root = str(node.get(STATE_DIR, ""))
    if not root:
        return None
    user = str(node.get(USER, node.get("partition-id", "")))
    if not user:
        raise RefusedError(
            NODE_CONFIG,
            f"node config: {STATE_DIR} is set and nothing says whose θ it is: add {USER}, or "
            "partition-id",
        )
    return Path(root), user


def run_of(training: int) -> str:
    """The name of a run that nobody named: no other training can take its place."""
    return f"training-{training:016x}" if training else NO_TRAINING


def _folder(name: str) -> str:
    """Any name as that of a folder; ``unquote`` gives it back, unless it is too long.

    A long name is cut and gets a hash of the whole.
    """
    try:
        quoted = quote(name, safe=" ").replace(".", "%2E")
    except UnicodeEncodeError:
        raise RefusedError(
            NODE_CONFIG,
            f"{name!r} cannot name a user or a run, because it holds half a character: choose "
            f"another {USER}, or {RUN}",
        ) from None
    if len(quoted) <= LONGEST_FOLDER:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()
    return quoted[: LONGEST_FOLDER - len(digest) - 1] + HASHED + digest


def _any_head(directory: Path) -> dict[str, Any]:
    """What a whole save in a directory says about itself; empty if there is none."""
    for path in sorted(directory.glob("*.theta"), reverse=True):
        try:
            head, _ = disk.unseal(path.read_bytes())
        except (OSError, ValueError):
            continue
        return head
    return {}


def _note(line: bytes) -> dict[str, Any] | None:
    """What a line of the list says; None if it is not whole."""
    try:
        note = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(note, dict) and isinstance(note.get("bytes"), dict)
    return note if whole else None
