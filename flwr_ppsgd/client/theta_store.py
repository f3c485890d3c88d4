"""What a device keeps: θ, the last w, what was agreed, what it cost, and what has left.

On disk, in ``STATE_DIR/user/``: one SQLite file, and arrays as files beside it. Without a directory
the same lives in the node's own state, which Flower keeps for as long as the run. One visit is one
transaction; no message ever carries the names under which any of it lives.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import quote, unquote

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_ppsgd import database
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import bytes_of, decode, record_from, vector_record
from flwr_ppsgd.checks import fast_replace
from flwr_ppsgd.client.policy import USER, owner_of
from flwr_ppsgd.client.refusal import RefusalCode, RefusedError
from flwr_ppsgd.client.theta import RUN, Theta, ThetaStamp, stamps_to_keep, theta_candidates
from flwr_ppsgd.database import Database, StoreError
from flwr_ppsgd.wire import Order

log = logging.getLogger("flwr.ppsgd")

NAME = "device.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL, seal BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS array (
    serial INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, run TEXT NOT NULL,
    about TEXT NOT NULL, seal BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sent (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, line TEXT NOT NULL, seal BLOB NOT NULL);
"""
ACCOUNT = "account"  # a fact; what was agreed with a training has its ``run_of``
THETA = "theta"
SHARED = "w"
MODEL = "model"
LEAST_SAVES = 2  # before the newest one, in case that is damaged
STATE = "ppsgd-personal"  # every θ in a node's state, newest first
STATE_FACTS = "ppsgd-agreed"
STATE_MODEL = "ppsgd-model"
STATE_SEEN = "ppsgd-store"  # how many replies the store on disk had noted when it was last used
NUMBERS_IN_STAMP = len(fields(ThetaStamp)) - 1  # its place tells the serial
LONGEST_FOLDER = 240  # bytes; file systems take 255


class StateStore:
    """What a node without a directory keeps, in its own state; neither w nor notes.

    Args:
        context: the node.
    """

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
        record = self._state.array_records.get(STATE)
        if record is None:
            return []
        numbers = decode(record["stamps"])
        stamps = []
        for place, row in enumerate(numbers.reshape(-1, NUMBERS_IN_STAMP).tolist()):
            stamps.append(fast_replace(ThetaStamp(*row), serial=-place))
        return stamps

    def load(self, stamp: ThetaStamp) -> Theta:
        """The θ of a stamp."""
        record = self._state.array_records[STATE]
        place = -stamp.serial
        stood = f"stood {place}"
        theta = decode(record[f"theta {place}"])
        return Theta(theta, stamp, decode(record[stood]) if stood in record else None)

    def put_theta(self, theta: Theta, order: Order | None) -> None:
        """Keep θ, with as many older ones as the server may go back to."""
        older = stamps_to_keep(theta.stamp, self.stamps(), order, least=0)
        stamps = []
        vectors = {}
        for place, each in enumerate([theta, *map(self.load, older)]):
            stamps.append(list(vars(each.stamp).values())[:NUMBERS_IN_STAMP])
            for name, vector in _vectors(each).items():
                vectors[f"{name} {place}"] = vector
        numbers = np.array(stamps, dtype=np.uint64)
        self._state[STATE] = vector_record({**vectors, "stamps": numbers})

    def put_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the personal model that follows from the last w."""
        self._state[STATE_MODEL] = vector_record(arrays)

    def facts(self) -> dict[str, Any]:
        """What ``put_fact`` kept, by name."""
        record = self._state.config_records.get(STATE_FACTS)
        if record is None:
            return {}
        return {name: json.loads(str(value)) for name, value in record.items()}

    def put_fact(self, name: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        facts = {**self.facts(), name: value}
        texts = {key: json.dumps(fact) for key, fact in facts.items()}
        self._state[STATE_FACTS] = ConfigRecord({**texts})


class DiskStore:
    """The store of one user on disk.

    Every row is sealed with the user's name: another user's store is refused as a damaged one is.

    Args:
        root: the state directory.
        user: the name of the user.
        run: the name under which θ is kept.
        named: whether somebody chose that name.
        read_only: for reports, which change nothing.
    """

    def __init__(
        self, root: Path, user: str, run: str = "", *, named: bool = True, read_only: bool = False
    ) -> None:
        self.root = root
        self.user = user
        self.run = run
        self.named = named
        self.directory = file_of(root, user).parent
        with self._refuse_unreadable():
            if not read_only:
                database.private_directory(self.directory)
                self.directory.chmod(database.PRIVATE_DIRECTORY)  # it may have been there before
            self._db = Database(self.directory / NAME, SCHEMA, read_only=read_only)

    @property
    def place(self) -> str:
        """Where θ is, for errors."""
        return f"run {self.run!r} in {self.root}"

    def close(self) -> None:
        """Give the file back; harmless if that was done before."""
        self._db.close()

    def of_run(self, run: str) -> Self:
        """The same store, for θ under this name."""
        return fast_replace(self, run=run)

    # --- reading

    def runs(self) -> list[str]:
        """The names of all runs, in the order of their first reply."""
        rows = self._rows("SELECT run FROM sent GROUP BY run ORDER BY MIN(id)")
        return [run for (run,) in rows]

    def stamps(self) -> list[ThetaStamp]:
        """Of every θ that is kept under this name, newest first."""
        stamps = []
        for serial, about in self._array_rows(THETA):
            stamp = ThetaStamp(**about["stamp"])
            stamps.append(fast_replace(stamp, serial=serial))
        return stamps

    def load(self, stamp: ThetaStamp) -> Theta | None:
        """The θ of a stamp; None if its file is damaged or missing, saying so."""
        about = dict(self._array_rows(THETA))[stamp.serial]
        try:
            parts = self._parts(THETA, stamp.serial, about)
        except StoreError as error:
            log.error("%s: θ goes on from the save before", error)
            return None
        vectors = {name: np.frombuffer(part) for name, part in parts.items()}
        return Theta(vectors["theta"], stamp, vectors.get("stood"))

    def newest(self) -> Theta:
        """The newest θ of all trainings under this name; RefusedError if there is no whole one."""
        stamps = self.stamps()
        last = stamps[0].training
        return _first_whole(self, [stamp for stamp in stamps if stamp.training == last])

    def last_shared(self) -> tuple[ArrayRecord, str]:
        """The last w that came, and what the server promised then."""
        rows = self._array_rows(SHARED)
        if not rows:
            raise ValueError(f"no w in {self.directory}: give the published one")
        ((serial, about),) = rows
        try:
            parts = self._parts(SHARED, serial, about)
        except StoreError as error:
            raise ValueError(f"no whole w ({error}): give the published one") from None
        return record_from(parts), about["promise"]

    def model(self) -> dict[str, NDArray[Any]] | None:
        """The personal model; None if the last w has not come yet."""
        rows = self._array_rows(MODEL)
        if not rows:
            return None
        record = record_from(self._parts(MODEL, *rows[0]))
        return {name: array.numpy() for name, array in record.items()}

    def facts(self) -> dict[str, Any]:
        """What ``put_fact`` kept, by name; RefusedError if any of it was changed."""
        found = {}
        for *row, sealed in self._rows("SELECT name, value, seal FROM fact"):
            name, value = row
            if self._seal(row) != sealed:
                raise self._damage_error(f"{name!r} is not what was written")
            found[name] = json.loads(value)
        return found

    def replies(self) -> int:
        """The number of replies that were noted."""
        ((number,),) = self._rows("SELECT IFNULL(MAX(id), 0) FROM sent")
        return int(number)

    def notes(self, run: str | None = None) -> list[dict[str, Any]]:
        """What has left, reply by reply, under one name or all; RefusedError if one was changed."""
        before = b""
        found = []
        rows = self._rows("SELECT run, line, seal FROM sent ORDER BY id")
        for place, (name, line, sealed) in enumerate(rows, 1):
            before = self._seal([place, name, line], before)
            if before != sealed:
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
        except (OSError, StoreError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RefusedError(
                RefusalCode.DISK,
                f"the store of user {self.user!r} in {self.directory} could not be written "
                f"({reason}): it stays as it was and this round counts as zero; free some space "
                "there, or make the directory writable",
            ) from error

    def put_theta(self, theta: Theta, order: Order | None) -> None:
        """Keep θ, and remove what no server can go back to; RefusedError if others stepped it."""
        kept = self.stamps()
        if _newest_serial(kept, theta.stamp.training) != theta.seen:
            raise RefusedError(
                RefusalCode.THETA_BUSY,
                f"θ of user {self.user!r} was stepped by another task while this one was at work: "
                "this step is dropped; start one SuperNode for each user",
            )
        parts = {}
        for name, vector in _vectors(theta).items():
            parts[name] = np.ascontiguousarray(vector, dtype=np.float64).tobytes()
        needed = stamps_to_keep(theta.stamp, kept, order, LEAST_SAVES)
        keep = [stamp.serial for stamp in needed]
        self._put(THETA, {"stamp": asdict(theta.stamp)}, parts, keep)

    def put_shared(self, arrays: Mapping[str, bytes], promise: str) -> None:
        """Keep the w that came last, as serialised arrays, and what was promised."""
        self._put(SHARED, {"promise": promise}, arrays)

    def put_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the personal model that follows from the last w; it holds the user's own rows."""
        self._put(MODEL, {}, bytes_of(vector_record(arrays)))

    def put_fact(self, name: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        row = [name, json.dumps(value)]
        self._db.rows("INSERT OR REPLACE INTO fact VALUES (?, ?, ?)", [*row, self._seal(row)])

    def note(self, line: Mapping[str, Any]) -> None:
        """Write down what leaves; each line is sealed with all before it."""
        last = self._db.rows("SELECT id, seal FROM sent ORDER BY id DESC LIMIT 1")
        number, before = last[0] if last else (0, b"")
        row = [number + 1, self.run, json.dumps(line)]
        self._db.rows("INSERT INTO sent VALUES (?, ?, ?, ?)", [*row, self._seal(row, before)])

    # --- rows and files

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._refuse_unreadable():
            return self._db.rows(query, values)

    def _seal(self, row: Sequence[Any], before: bytes = b"") -> bytes:
        return database.seal(before, self.user, row)

    def _array_rows(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        """The number of each save of a kind and what is said about it, newest first."""
        query = (
            "SELECT serial, kind, run, about, seal FROM array WHERE kind = ? AND run = ? "
            "ORDER BY serial DESC"
        )
        found = []
        for *row, sealed in self._rows(query, (kind, self.run)):
            serial, _, _, about = row
            if self._seal(row) != sealed:
                raise self._damage_error(f"the row about array {serial} is not what was written")
            found.append((serial, json.loads(about)))
        return found

    def _parts(self, kind: str, serial: int, about: Mapping[str, Any]) -> dict[str, bytes]:
        """What is in the file of a save, by name; StoreError if it is not what was written."""
        content = database.read_verified(self._path(serial, kind), about["sha256"])
        parts = {}
        start = 0
        for name, size in about["sizes"].items():
            parts[name] = content[start : start + size]
            start += size
        return parts

    def _put(
        self,
        kind: str,
        about: Mapping[str, Any],
        parts: Mapping[str, bytes],
        keep: Sequence[int] = (),
    ) -> None:
        """Write the file, then the row that names it, in place of all of this kind but ``keep``."""
        before = [serial for serial, _ in self._array_rows(kind)]
        ((last,),) = self._db.rows("SELECT IFNULL(MAX(seq), 0) FROM sqlite_sequence")
        serial = last + 1
        sha256 = database.write_file(self._path(serial, kind), parts.values())
        sizes = {name: len(part) for name, part in parts.items()}
        text = json.dumps({**about, "sizes": sizes, "sha256": sha256})
        row = [serial, kind, self.run, text]
        self._db.rows("INSERT INTO array VALUES (?, ?, ?, ?, ?)", [*row, self._seal(row)])
        for old in set(before).difference(keep):
            self._db.rows("DELETE FROM array WHERE serial = ?", (old,))

    def _remove_leftovers(self) -> None:
        """Files that no row names any more, or never did because of a crash."""
        rows = self._db.rows("SELECT serial, kind FROM array")
        named = {self._path(*row).name for row in rows}
        for name in os.listdir(self.directory):
            if name not in named and not name.startswith(NAME):
                (self.directory / name).unlink(missing_ok=True)

    def _path(self, serial: int, kind: str) -> Path:
        return self.directory / f"{serial:010d}.{kind}"

    @contextmanager
    def _refuse_unreadable(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise self._damage_error(str(error)) from None
        except OSError as error:
            raise RefusedError(
                RefusalCode.DISK,
                f"the store of user {self.user!r} could not be read from {self.directory} "
                f"({error.strerror or error}): this round counts as zero; make the directory "
                "readable",
            ) from error

    def _damage_error(self, found: str) -> RefusedError:
        return RefusedError(
            RefusalCode.THETA_DAMAGED,
            f"the store of user {self.user!r} in {self.directory} is damaged, or another user's "
            f"({found}): nothing is sent; restore it from a backup",
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


def keep_reply_count(context: Context, store: DiskStore) -> None:
    """Keep in the node how far its store has come: ``store_of`` refuses one that goes back."""
    context.state[STATE_SEEN] = ConfigRecord({"replies": store.replies()})


def theta_for(store: Store, order: Order | None, initial: Vector, *, stepping: bool) -> Theta:
    """The θ that counts for an Order, or a new one; the newest one without an Order.

    Args:
        store: where it is kept.
        order: what is asked; None by a stock strategy.
        initial: θ before the first visit.
        stepping: whether it is to be stepped.
    """
    stamps = store.stamps()  # before θ is read: what another task saves from now on must show
    if order is not None:
        training = order.training
        found = theta_candidates(stamps, order, stepping=stepping, named=store.named)
    else:
        training = stamps[0].training if stamps else 0
        found = [stamp for stamp in stamps if stamp.training == training]
    theta = Theta(initial, ThetaStamp(training=training))
    if found:
        theta = _first_whole(store, found)
    if theta.theta.shape != initial.shape:
        raise RefusedError(
            RefusalCode.THETA_FOREIGN,
            f"the θ of {store.place} has {theta.theta.size} numbers and this learner's has "
            f"{initial.size}: it belongs to another model; go on with that one there, or name "
            f"another {RUN} to begin anew",
        )
    theta = fast_replace(theta, seen=_newest_serial(stamps, training))
    return theta if order is None else theta.in_training(order)


def _newest_serial(stamps: Sequence[ThetaStamp], training: int) -> int:
    return max((stamp.serial for stamp in stamps if stamp.training == training), default=0)


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
    files = sorted(root.glob(f"*/{NAME}"))
    return [unquote(file.parent.name) for file in files]


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


def _vectors(theta: Theta) -> dict[str, NDArray[Any]]:
    """θ, and Σ θ_t if it is kept."""
    vectors: dict[str, NDArray[Any]] = {"theta": theta.theta}
    if theta.stood is not None:
        vectors["stood"] = theta.stood
    return vectors
