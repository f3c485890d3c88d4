"""What a device keeps: θ, the last w, what was agreed, what it cost, and what has left.

On disk, in ``STATE_DIR/user/``: one SQLite file, and arrays as files beside it. Without a directory
the same lives in the node's own state, which Flower keeps for as long as the run. One visit is one
transaction; no message ever carries the names under which any of it lives.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias
from urllib.parse import quote, unquote

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_ppsgd import database
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import bytes_of, decode_vector, record_from, vector_record
from flwr_ppsgd.checks import fast_replace
from flwr_ppsgd.client.policy import USER, owner_of
from flwr_ppsgd.client.refusal import DiskError, RefusalCode, RefusedError
from flwr_ppsgd.client.theta import RUN, STAMP, Theta, ThetaStamp, still_needed, theta_candidates
from flwr_ppsgd.database import Database, StoreError
from flwr_ppsgd.wire import Order

log = logging.getLogger("flwr.ppsgd")

NAME = "device.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL, seal BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS array (
    serial INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, run TEXT NOT NULL,
    about TEXT NOT NULL, sha256 TEXT NOT NULL, seal BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sent (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, line TEXT NOT NULL, seal BLOB NOT NULL);
"""
OWNER = "owner"
ACCOUNT = "account"  # a fact; what was agreed with a training has its ``run_of``
THETA = "theta"
SHARED = "w"
MODEL = "model"
LEAST_SAVES = 2  # before the newest one, in case that is damaged
STATE = "ppsgd-personal"  # the newest θ in a node's state; older ones are STATE-1, STATE-2, …
STATE_FACTS = "ppsgd-agreed"
STATE_MODEL = "ppsgd-model"
STATE_SEEN = "ppsgd-store"  # how many replies the store on disk had noted when it was last used
LONGEST_FOLDER = 240  # bytes; file systems take 255
Part: TypeAlias = bytes | memoryview


class SharedCopy(NamedTuple):
    """w as serialised arrays, in which round it came, and what the server promised then."""

    arrays: dict[str, bytes]
    round: int
    promise: str


class StateStore:
    """What a node without a directory keeps, in its own state; neither w nor notes.

    Args:
        context: the node.
    """

    on_disk = False
    place = "this node's state"

    def __init__(self, context: Context) -> None:
        self._state = context.state
        self.named = RUN in context.run_config

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nothing to lock, and nothing that can fail."""
        yield

    def stamps(self) -> list[ThetaStamp]:
        """Of every θ that is kept, newest first."""
        stamps = []
        for place, record in enumerate(self._records()):
            numbers = decode_vector(record["stamp"]).tolist()
            stamps.append(ThetaStamp(**dict(zip(STAMP[:-1], numbers, strict=True)), serial=-place))
        return stamps

    def load(self, stamp: ThetaStamp) -> Theta:
        """The θ of a stamp."""
        record = self._records()[-stamp.serial]
        stood = decode_vector(record["stood"]) if "stood" in record else None
        return Theta(decode_vector(record["theta"]), stamp, stood)

    def put_theta(self, theta: Theta, back: int) -> None:
        """Keep θ, with as many older ones as the server may go back to."""
        before = self._records()
        kept = still_needed(theta.stamp, self.stamps(), back, least=0)
        numbers = np.array([getattr(theta.stamp, name) for name in STAMP[:-1]], dtype=np.uint64)
        records = [vector_record({**theta.vectors(), "stamp": numbers})]
        records += [before[-stamp.serial] for stamp in kept]
        for place, record in enumerate(records):
            self._state[_state_name(place)] = record
        for place in range(len(records), len(before)):
            del self._state[_state_name(place)]

    def put_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the personal model that follows from the last w."""
        self._state[STATE_MODEL] = _record(arrays)

    def fact(self, name: str) -> Any:
        """What ``put_fact`` kept under a name, or None."""
        return self._facts().get(name)

    def put_fact(self, name: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        facts = {**self._facts(), name: value}
        self._state[STATE_FACTS] = ConfigRecord({"json": json.dumps(facts)})

    def _records(self) -> list[ArrayRecord]:
        records: list[ArrayRecord] = []
        while isinstance(record := self._state.get(_state_name(len(records))), ArrayRecord):
            records.append(record)
        return records

    def _facts(self) -> dict[str, Any]:
        record = self._state.get(STATE_FACTS)
        if not isinstance(record, ConfigRecord):
            return {}
        facts: dict[str, Any] = json.loads(str(record["json"]))
        return facts


class SavedArrays(NamedTuple):
    """A row about a file: its number, what is in it, and its SHA-256."""

    serial: int
    about: dict[str, Any]
    sha256: str


class DiskStore:
    """The store of one user on disk.

    Args:
        root: the state directory.
        user: the name of the user.
        run: the name under which θ is kept.
        named: whether somebody chose that name.
        read_only: for reports, which change nothing.
    """

    on_disk = True

    def __init__(
        self, root: Path, user: str, run: str = "", *, named: bool = True, read_only: bool = False
    ) -> None:
        self.root = root
        self.user = user
        self.run = run
        self.named = named
        self.directory = file_of(root, user).parent
        self.place = f"run {run!r} in {root}"
        with self._readable():
            if not read_only:
                database.private_directory(self.directory)
                if self.directory.stat().st_mode & 0o077:  # it was there before
                    self.directory.chmod(database.PRIVATE_DIRECTORY)
            self._db = Database(self.directory / NAME, SCHEMA, read_only=read_only)
            self._check_owner(read_only)

    def _check_owner(self, read_only: bool) -> None:
        found = self._db.rows("SELECT value FROM fact WHERE name = ?", (OWNER,))
        if not found and not read_only:
            with self._db.transaction():
                self.put_fact(OWNER, self.user)
        elif found and json.loads(found[0][0]) != self.user:
            raise RefusedError(
                RefusalCode.THETA_FOREIGN,
                f"{self.directory} holds the θ of user {json.loads(found[0][0])!r}, not that of "
                f"{self.user!r}: nothing was read from it; put the right file back",
            )

    def close(self) -> None:
        """Give the file back; harmless if that was done before."""
        self._db.close()

    def of_run(self, run: str) -> Self:
        """The same store, for θ under this name."""
        return fast_replace(self, run=run, place=f"run {run!r} in {self.root}")

    # --- reading

    def runs(self) -> list[str]:
        """The names of all runs, in the order of their first reply."""
        rows = self._db.rows("SELECT run FROM sent GROUP BY run ORDER BY MIN(id)")
        return [run for (run,) in rows]

    def stamps(self) -> list[ThetaStamp]:
        """Of every θ that is kept under this name, newest first."""
        return [
            ThetaStamp(**{**row.about["stamp"], "serial": row.serial})
            for row in self._array_rows(THETA)
        ]

    def load(self, stamp: ThetaStamp) -> Theta | None:
        """The θ of a stamp; None if its file is damaged or missing, saying so."""
        (row,) = [row for row in self._array_rows(THETA) if row.serial == stamp.serial]
        try:
            parts = self._parts(THETA, row)
        except StoreError as error:
            log.error("%s: θ goes on from the save before", error)
            return None
        vectors = {name: np.frombuffer(part) for name, part in parts.items()}
        return Theta(vectors["theta"], stamp, vectors.get("stood"))

    def newest(self) -> Theta:
        """The newest θ of all trainings under this name; RefusedError if there is no whole one."""
        stamps = self.stamps()
        return _first_whole(self, [each for each in stamps if each.training == stamps[0].training])

    def last_shared(self) -> SharedCopy:
        """The last w that came."""
        try:
            (row,) = self._array_rows(SHARED)
            parts = self._parts(SHARED, row)
        except ValueError as error:
            raise ValueError(
                f"no whole w in {self.directory} ({error}): give the published one"
            ) from None
        arrays = {name: bytes(part) for name, part in parts.items()}
        return SharedCopy(arrays, row.about["round"], row.about["promise"])

    def model(self) -> dict[str, NDArray[Any]] | None:
        """The personal model; None if the last w has not come yet."""
        rows = self._array_rows(MODEL)
        if not rows:
            return None
        parts = self._parts(MODEL, rows[0])
        record = record_from({name: bytes(part) for name, part in parts.items()})
        return {name: array.numpy() for name, array in record.items()}

    def fact(self, name: str) -> Any:
        """What ``put_fact`` kept under a name, or None; RefusedError if it was changed."""
        with self._readable():
            rows = self._db.rows("SELECT value, seal FROM fact WHERE name = ?", (name,))
        if not rows:
            return None
        value, sealed = rows[0]
        if database.seal(b"", self.user, (name, value)) != sealed:
            raise self._damage_error(f"{name!r} is not what was written")
        return json.loads(value)

    def check_facts(self) -> None:
        """RefusedError if any fact was changed."""
        for (name,) in self._db.rows("SELECT name FROM fact"):
            self.fact(name)

    def replies(self) -> int:
        """The number of replies that were noted."""
        with self._readable():
            ((number,),) = self._db.rows("SELECT IFNULL(MAX(id), 0) FROM sent")
        return int(number)

    def notes(self, run: str | None = None) -> list[dict[str, Any]]:
        """What has left, reply by reply, under one name or all; RefusedError if one was changed."""
        before = b""
        found = []
        with self._readable():
            rows = self._db.rows("SELECT id, run, line, seal FROM sent ORDER BY id")
        for place, (number, name, line, sealed) in enumerate(rows, 1):
            before = database.seal(before, self.user, (place, name, line))
            if before != sealed or number != place:
                raise self._damage_error(f"reply {place} is not what was written")
            if run in (None, name):
                found.append(json.loads(line))
        return found

    # --- writing

    @contextmanager
    def writing(self) -> Iterator[None]:
        """All of the block or nothing, on the disk when it has ended."""
        try:
            with self._db.transaction():
                yield
            self._remove_leftovers()
        except RefusedError:
            raise
        except (OSError, StoreError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DiskError(
                f"the store of user {self.user!r} in {self.directory} could not be written "
                f"({reason}): it stays as it was and this round counts as zero; free some space "
                "there, or make the directory writable"
            ) from error

    def put_theta(self, theta: Theta, back: int) -> None:
        """Keep θ, and remove what no server can go back to; RefusedError if others stepped it."""
        kept = self.stamps()
        training = theta.stamp.training
        newest = max((each.serial for each in kept if each.training == training), default=0)
        if newest != theta.seen:
            raise RefusedError(
                RefusalCode.THETA_BUSY,
                f"θ of user {self.user!r} was stepped by another task while this one was at work: "
                "this step is dropped; start one SuperNode for each user",
            )
        parts: dict[str, Part] = {
            name: np.ascontiguousarray(vector, dtype=np.float64).data.cast("B")
            for name, vector in theta.vectors().items()
        }
        self._put(THETA, {"stamp": asdict(theta.stamp)}, parts)
        needed = {each.serial for each in still_needed(theta.stamp, kept, back, LEAST_SAVES)}
        self._drop({each.serial for each in kept} - needed)

    def put_shared(self, shared: SharedCopy) -> None:
        """Keep the w that came last, and what was promised."""
        about = {"round": shared.round, "promise": shared.promise}
        self._put_only(SHARED, about, shared.arrays)

    def put_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the personal model that follows from the last w; it holds the user's own rows."""
        self._put_only(MODEL, {}, bytes_of(_record(arrays)))

    def put_fact(self, name: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        text = json.dumps(value)
        sealed = database.seal(b"", self.user, (name, text))
        self._db.rows("INSERT OR REPLACE INTO fact VALUES (?, ?, ?)", (name, text, sealed))

    def note(self, line: Mapping[str, Any]) -> None:
        """Write down what leaves."""
        last = self._db.rows("SELECT id, seal FROM sent ORDER BY id DESC LIMIT 1")
        number, before = last[0] if last else (0, b"")
        row = (number + 1, self.run, json.dumps(line))
        sealed = database.seal(before, self.user, row)
        self._db.rows("INSERT INTO sent VALUES (?, ?, ?, ?)", (*row, sealed))

    # --- rows and files

    def _array_rows(self, kind: str) -> list[SavedArrays]:
        """The rows about arrays of a kind, newest first."""
        query = (
            "SELECT serial, kind, run, about, sha256, seal FROM array WHERE kind = ? AND run = ? "
            "ORDER BY serial DESC"
        )
        found = []
        with self._readable():
            rows = self._db.rows(query, (kind, self.run))
        for *row, sealed in rows:
            serial, _, _, about, sha256 = row
            if database.seal(b"", self.user, row) != sealed:
                raise self._damage_error(f"the row about array {serial} is not what was written")
            found.append(SavedArrays(serial, json.loads(about), sha256))
        return found

    def _parts(self, kind: str, row: SavedArrays) -> dict[str, memoryview]:
        """What is in the file of a row, by name; StoreError if it is not what was written."""
        content = memoryview(database.read_verified(self._path(row.serial, kind), row.sha256))
        parts = {}
        start = 0
        for name, size in row.about["sizes"].items():
            parts[name] = content[start : start + size]
            start += size
        return parts

    def _put(self, kind: str, about: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
        """The file first, then the row that names it."""
        ((last,),) = self._db.rows("SELECT IFNULL(MAX(seq), 0) FROM sqlite_sequence")
        path = self._path(last + 1, kind)
        if kind == SHARED:
            sha256 = _write_unsynced(path, parts.values())  # it is public, and can be had again
        else:
            sha256 = database.write_file(path, parts.values())
        sizes = {name: len(part) for name, part in parts.items()}
        row = [last + 1, kind, self.run, json.dumps({**about, "sizes": sizes}), sha256]
        sealed = database.seal(b"", self.user, row)
        self._db.rows("INSERT INTO array VALUES (?, ?, ?, ?, ?, ?)", (*row, sealed))

    def _put_only(self, kind: str, about: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
        """In place of what was there of this kind."""
        before = {row.serial for row in self._array_rows(kind)}
        self._put(kind, about, parts)
        self._drop(before)

    def _drop(self, serials: set[int]) -> None:
        for serial in serials:
            self._db.rows("DELETE FROM array WHERE serial = ?", (serial,))

    def _remove_leftovers(self) -> None:
        """Files that no row names any more, or never did because of a crash."""
        files = {name for name in os.listdir(self.directory) if not name.startswith(NAME)}
        rows = self._db.rows("SELECT serial, kind FROM array")
        for name in files - {self._path(*row).name for row in rows}:
            (self.directory / name).unlink(missing_ok=True)

    def _path(self, serial: int, kind: str) -> Path:
        return self.directory / f"{serial:010d}.{kind}"

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except RefusedError:
            raise
        except StoreError as error:
            raise self._damage_error(str(error)) from None
        except OSError as error:
            raise DiskError(
                f"the store of user {self.user!r} could not be read from {self.directory} "
                f"({error.strerror or error}): this round counts as zero; make the directory "
                "readable"
            ) from error

    def _damage_error(self, found: str) -> RefusedError:
        return RefusedError(
            RefusalCode.THETA_DAMAGED,
            f"the store of user {self.user!r} in {self.directory} is damaged ({found}): nothing is "
            "sent; restore it from a backup",
        )


Store: TypeAlias = DiskStore | StateStore


def store_of(context: Context, training: int) -> Store:
    """The node's store, on disk if the node config names a directory.

    Args:
        context: the node.
        training: the server's training, by which a run without a name is known; 0 if there is none.
    """
    owner = owner_of(context.node_config)
    if owner is None:
        return StateStore(context)
    root, user = owner
    run = str(context.run_config.get(RUN, ""))
    store = DiskStore(root, user, run or run_of(training), named=bool(run))
    seen = context.state.get(STATE_SEEN)
    before = int(seen["replies"]) if isinstance(seen, ConfigRecord) else 0  # type: ignore[arg-type]
    now = store.replies()
    if before > now:
        store.close()
        raise RefusedError(
            RefusalCode.THETA_DAMAGED,
            f"the store in {store.directory} has gone back in time: {now} replies are noted in it "
            f"and there were {before}. What it has forgotten would be spent twice; put the newer "
            "one back, or start the SuperNode anew to go on with this one",
        )
    return store


def theta_for(
    store: Store, order: Order | None, initial: Vector, *, stepping: bool, run_id: int
) -> Theta:
    """The θ that counts for an Order, or a new one; the newest one without an Order.

    Args:
        store: where it is kept.
        order: what is asked; None by a stock strategy.
        initial: θ before the first visit.
        stepping: whether it is to be stepped.
        run_id: the Flower run.
    """
    stamps = store.stamps()  # before θ is read: what another task saves from now on must show
    if order is not None:
        training = order.training
        found = theta_candidates(stamps, order, stepping=stepping, named=store.named)
    else:
        training = stamps[0].training if stamps else 0
        found = [stamp for stamp in stamps if stamp.training == training]
    theta = Theta(initial, ThetaStamp(run_id, training=training))
    if found:
        theta = _first_whole(store, found)
    if theta.theta.shape != initial.shape:
        raise RefusedError(
            RefusalCode.THETA_FOREIGN,
            f"the θ of {store.place} has {theta.theta.size} numbers and this learner's has "
            f"{initial.size}: it belongs to another model; go on with that one there, or name "
            f"another {RUN} to begin anew",
        )
    own = [stamp.serial for stamp in stamps if stamp.training == training]
    theta = fast_replace(theta, seen=max(own, default=0) if store.on_disk else 0)
    return theta if order is None else theta.in_training(order, run_id)


def _first_whole(store: Store, stamps: Sequence[ThetaStamp]) -> Theta:
    """The first θ whose file is as it was written; RefusedError if there is none.

    Neither another training's θ nor a new one takes the place of damaged ones.
    """
    for stamp in stamps:
        theta = store.load(stamp)
        if theta is not None:
            return theta
    raise RefusedError(
        RefusalCode.THETA_DAMAGED,
        f"saves of θ of {store.place} are damaged and no whole one of training "
        f"{stamps[0].training:016x} is left: it is not begun anew unasked; restore the store from "
        f"a backup, or name another {RUN} to begin anew",
    )


def run_of(training: int) -> str:
    """The name of a run that nobody named: no other training can take its place."""
    return f"training-{training:016x}" if training else "no-training"


def users_in(root: Path) -> list[str]:
    """The users whose stores are below a state directory."""
    return [unquote(path.parent.name) for path in sorted(root.glob(f"*/{NAME}"))]


def file_of(root: Path, user: str) -> Path:
    """Where a user's store is: any name names a folder, and ``unquote`` gives it back."""
    try:
        quoted = quote(user, safe=" ").replace(".", "%2E")
    except UnicodeEncodeError:
        quoted = ""
    if not 0 < len(quoted) <= LONGEST_FOLDER:
        raise RefusedError(
            RefusalCode.NODE_CONFIG,
            f"{user[:LONGEST_FOLDER]!r} cannot name a folder, because it holds half a character "
            f"or takes more than {LONGEST_FOLDER} bytes: choose another {USER}",
        )
    return root / quoted / NAME


def _state_name(place: int) -> str:
    return f"{STATE}-{place}" if place else STATE


def _record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(each) for name, each in arrays.items()})


def _write_unsynced(path: Path, parts: Iterable[Part]) -> str:
    """Write a new file without waiting for the disk, and return its SHA-256."""
    path.unlink(missing_ok=True)  # what a crash has left
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, flags, database.PRIVATE_FILE), "wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
    return digest.hexdigest()
