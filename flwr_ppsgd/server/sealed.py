"""Rows that are only ever added, each sealed over all before it, and a record of them elsewhere.

A row that was changed, moved or removed breaks the seals after it. Rows that are missing at the end
show by the record, which is kept outside the directory: it has the number of rows, the last seal
and the number of charges. A snapshot of the whole machine takes the record back too.
"""

import hashlib
import json
import logging
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr_ppsgd import database
from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.database import Database, StoreError, private_directory, seal, write_file
from flwr_ppsgd.ledger import release_from_dict, release_to_dict

log = logging.getLogger("flwr.ppsgd")

FORMAT = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, what TEXT NOT NULL, value TEXT NOT NULL, seal BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS fact (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, value TEXT NOT NULL
) STRICT;
"""
FIRST = "begin"  # the first row of each file: whose it is
SUFFIX = ".charges"
ROOM_FOR_ROWS = 64 * 1024  # bytes that the rows of one round need at most
NO_RECORD = (
    "the record of charges outside the checkpoint directory was missing when the training went on, "
    "so charges that were lost before would not have shown"
)
RECORD_NOT_WRITTEN = (
    "the record of charges outside the checkpoint directory could not be written, so a store that "
    "goes back in time would not show"
)

Add = Callable[[str, Any], None]


@dataclass(frozen=True)
class ChargeRecord:
    """How far a file had come when it was last written.

    Args:
        owner: the id of the training, or of the budget.
        file: where it was.
        rows: the number of rows.
        seal: the seal of the last row, as hexadecimal digits.
        charges: the number of charges among them.
    """

    owner: int
    file: str
    rows: int
    seal: str
    charges: int

    @property
    def path(self) -> Path:
        return home() / f"{self.owner}{SUFFIX}"

    def write(self) -> None:
        """Replace the record of this owner. When this returns, it is on the disk."""
        private_directory(home())
        text = json.dumps(asdict(self))
        check = hashlib.sha256(text.encode()).hexdigest()
        write_file(self.path, [f"{text}\n{check}\n".encode()])

    @classmethod
    def read(cls, path: Path) -> "ChargeRecord | None":
        """The record in a file; None if it is missing or damaged."""
        try:
            text, check = path.read_text(encoding="utf-8").splitlines()
            if hashlib.sha256(text.encode()).hexdigest() != check:
                raise ValueError("its checksum is wrong")
            return cls(**json.loads(text))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning("The record of charges %s cannot be read: %s", path, error)
            return None


def home() -> Path:
    """Where records are: ``$PPSGD_STATE_HOME``, ``$XDG_STATE_HOME/ppsgd`` or
    ``~/.local/state/ppsgd``.

    The first that is set counts. OSError if there is no home directory.
    """
    own = os.environ.get("PPSGD_STATE_HOME")
    if own:
        return Path(own)
    shared = Path(os.environ.get("XDG_STATE_HOME", ""))
    if shared.is_absolute():  # others do not count, by the XDG specification
        return shared / "ppsgd"
    try:
        return Path.home() / ".local" / "state" / "ppsgd"
    except RuntimeError as error:
        raise OSError(f"no place for records ({error}): set PPSGD_STATE_HOME") from None


class SealedRows:
    """What was released, and what the statement depends on: sealed rows of a SQLite file.

    Args:
        path: the file; None is in memory, and nothing is on the disk.
        kind: what this is the memory of, "training" or "budget".
        read_only: write nothing, for reports.
        repair: open it although charges were lost, to add them by hand.
    """

    def __init__(
        self, path: Path | None, kind: str, *, read_only: bool = False, repair: bool = False
    ) -> None:
        self.path = path
        self._kind = kind
        self._read_only = read_only
        self._repair = repair
        self._database: Database | None = None
        self._last: ChargeRecord | None = None  # what this process knows to be on the disk
        self._room_for_files = 0  # bytes
        self._clear()

    def _clear(self) -> None:
        self.owner = 0
        self.kinds: list[Release] = []
        self.tally: Counter[tuple[int, int, bool]] = Counter()  # by training, kind, insecure
        self.added = 0  # charges that were added by hand, of an unknown release
        self.caveats: dict[str, str] = {}  # what every statement must say, and who is protected
        self._notes: dict[str, list[Any]] = {}
        self._rows = 0
        self._seal = b""

    # --- open and close

    @property
    def is_open(self) -> bool:
        return self._database is not None

    def close(self) -> None:
        """Give up the file; closing twice does nothing, nor does closing rows in memory."""
        if self._database is not None and self.path is not None:
            self._database.close()
            self._database = None

    def open(self) -> None:
        """Read and verify everything, and compare it with what is known elsewhere."""
        if self.is_open:
            return
        self._clear()
        self._database = Database(self.path, SCHEMA, read_only=self._read_only)
        try:
            if self._read_only:
                self._read_new_rows()
            else:
                with self.transaction() as add:
                    if self.path is not None and not self._repair:
                        self.refuse_lost_rows()
                    if not self._rows:
                        add(FIRST, {"format": FORMAT, self._kind: secrets.randbits(62)})
            if not self._rows:
                raise StoreError(f"{self.path} has no rows: no {self._kind} has begun there")
            found = self.notes(FIRST)[0]["format"]
            if found != FORMAT:
                raise StoreError(
                    f"{self.path} has format {found}, this version reads {FORMAT}: continue with "
                    "the version of flwr-ppsgd that wrote it"
                )
            is_kept = self.path is not None and not self._read_only
            if is_kept and self.charge_count and self.outside_record() is None:
                self.note_caveat(NO_RECORD)
        except BaseException:
            self.close()
            raise

    def backup(self, target: Path) -> None:
        """Copy the file consistently, also while a training runs."""
        self._sqlite().backup(target)

    # --- room on the disk

    def reserve(self, size: int = 0) -> None:
        """Take room for all that a round will write, before anything is sent.

        Args:
            size: of the files that will be written besides rows, in bytes.
        """
        if self.path is None:
            return
        self._room_for_files = size
        whole = size + ROOM_FOR_ROWS
        reserved = self.reserve_file
        if reserved.exists() and reserved.stat().st_size == whole:
            return
        try:
            database.allocate(reserved, whole)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{reserved.parent} has no room for the {whole // 1024} KiB that a round may need "
                f"({error.strerror}): nothing was sent; free some space and start again",
            ) from None

    @property
    def reserve_file(self) -> Path:
        """Where ``reserve`` takes the room."""
        assert self.path is not None
        return self.path.with_suffix(".reserve")

    # --- what the rows say

    @property
    def charge_count(self) -> int:
        """The number of charges."""
        return self.tally.total() + self.added

    def notes(self, what: str) -> list[Any]:
        """Everything that was noted under a heading, oldest first."""
        return self._notes.get(what, [])

    def _read_new_rows(self) -> None:
        """Verify and take the rows that were added since the last time."""
        query = "SELECT id, what, value, seal FROM entry WHERE id >= ? ORDER BY id"
        found = self._sqlite().rows(query, (self._rows,))
        if self._rows and (not found or found.pop(0)[3] != self._seal):
            raise self._damage_at(self._rows)
        for id_, what, text, sealed in found:
            place = self._rows + 1
            try:
                self._take(what, json.loads(text))
            except (ValueError, TypeError, KeyError, IndexError):
                raise self._damage_at(place) from None
            if id_ != place or seal(self._seal, self.owner, [what, text]) != sealed:
                raise self._damage_at(place)
            self._rows = place
            self._seal = sealed

    def _take(self, what: str, value: Any) -> None:
        """Remember what a row says."""
        self._notes.setdefault(what, []).append(value)
        if what == FIRST:
            self.owner = value[self._kind]
        elif what == "release":
            self.kinds.append(release_from_dict(value))
        elif what == "charge":
            _, kind, insecure, training = value
            self.tally[training, kind, insecure] += 1
        elif what == "added":
            self.added += value[0]
        elif what == "caveat":
            self.caveats.update([value])

    def _damage_at(self, place: int) -> StoreError:
        assert self.path is not None
        return StoreError(
            f"{self.path} is damaged at row {place}: what was released is no longer known, so "
            "it is not continued; restore the newest backup and add the charges that it lacks "
            f"(ppsgd ledger {self.path.parent} --add N), or start anew in another directory"
        )

    # --- more rows

    @contextmanager
    def transaction(self) -> Iterator[Add]:
        """A function that adds a row; at the end all of them are on the disk, and recorded outside.

        After an error nothing may be published: whether a row is on the disk is not known. So if
        one was added, the file is closed, and read again when it is opened; in memory, at once.
        """
        before = -1
        try:
            with self._sqlite().transaction() as connection:
                self._read_new_rows()
                before = self._rows
                yield lambda what, value: self._add(connection, what, value)
        except BaseException:
            if self._rows != before:
                self.close()
                if self.is_open:  # in memory
                    self._clear()
                    self._read_new_rows()
            raise
        if self.path is not None:
            self._last = ChargeRecord(
                self.owner, _place(self.path), self._rows, self._seal.hex(), self.charge_count
            )
            if self._rows != before and self.charge_count:
                self._keep_record(self._last)

    def _add(self, connection: sqlite3.Connection, what: str, value: Any) -> None:
        text = json.dumps(value, allow_nan=False)
        self._take(what, value)
        self._seal = seal(self._seal, self.owner, [what, text])
        self._rows += 1
        row = (self._rows, what, text, self._seal)
        connection.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", row)

    def note(self, what: str, value: Any) -> None:
        """Add a row under a heading of its own. When this returns, it is on the disk."""
        with self.transaction() as add:
            add(what, value)

    def note_caveat(self, caveat: str, unit: str = "user") -> None:
        """Add what every statement must say from now on; each caveat once.

        ``unit`` is who is protected: "user", or "node" if a user may come back as another node.
        """
        if self.caveats.get(caveat) != unit:
            self.note("caveat", [caveat, unit])

    def _add_charge(
        self, add: Add, training: int, round_: int, release: Release, insecure: bool = False
    ) -> None:
        """Add a row for one release, in the part of the reserve that is for rows."""
        if self.path is not None and self.reserve_file.exists():
            os.truncate(self.reserve_file, self._room_for_files)
        if release not in self.kinds:
            add("release", release_to_dict(release))
        add("charge", [round_, self.kinds.index(release), insecure, training])

    def _sqlite(self) -> Database:
        if self._database is None:
            raise StoreError(f"{self.path} is closed: start again")
        return self._database

    # --- what is known elsewhere

    def outside_record(self) -> ChargeRecord | None:
        """The record outside; None if it is missing or damaged."""
        try:
            return ChargeRecord.read(home() / f"{self.owner}{SUFFIX}")
        except OSError:
            return None

    def refuse_lost_rows(self) -> None:
        """StoreError if this process, or the record outside, knows of rows that are not here."""
        self._refuse_other_owner()
        known = {"this process has made": self._last}
        known["the record outside shows"] = self.outside_record()
        for who, record in known.items():
            if record is None:
                continue
            self.refuse_fewer_charges(record.charges, who)
            if self._rows < record.rows:
                reason = f"has {self._rows} rows but {who} {record.rows}: rows were lost"
                raise self._lost(reason, 1)
            query = "SELECT seal FROM entry WHERE id = ?"
            ((found,),) = self._sqlite().rows(query, (record.rows,))
            if found.hex() != record.seal:
                reason = f"is not the one of which {who} {record.charges} charges"
                raise self._lost(f"{reason}: another copy went on", record.charges)

    def refuse_fewer_charges(self, known: int, who: str) -> None:
        """StoreError if charges are missing here that ``who`` knows of."""
        if self.charge_count < known:
            reason = f"shows {self.charge_count} charges but {who} {known}: charges were lost"
            raise self._lost(reason, known - self.charge_count)

    def _refuse_other_owner(self) -> None:
        """A file that was removed, emptied or replaced leaves its record behind."""
        assert self.path is not None
        try:
            records = [ChargeRecord.read(path) for path in sorted(home().glob(f"*{SUFFIX}"))]
        except OSError:
            return
        place = _place(self.path)
        for known in records:
            if known and known.file == place and known.owner != self.owner and known.charges:
                raise StoreError(
                    f"{self.path} is missing or another one: the record {known.path} knows of "
                    f"{known.charges} charges of the {self._kind} that was here; put its file "
                    "back, or use another directory, or remove that record if the "
                    f"{self._kind} was deleted on purpose"
                )

    def _lost(self, reason: str, charges: int) -> StoreError:
        assert self.path is not None
        return StoreError(
            f"{self.path} {reason}, so it is not continued; put the newest file back, or add what "
            f"is missing with: ppsgd ledger {self.path.parent} --add {charges}"
        )

    def _keep_record(self, record: ChargeRecord) -> None:
        """Write the record outside; a training goes on without it, and says so."""
        known = self.outside_record() if self._repair else None
        if known is not None and known.charges > record.charges:
            return
        try:
            record.write()
        except OSError as error:
            if RECORD_NOT_WRITTEN in self.caveats:
                return
            log.warning(
                "The record of charges cannot be written (%s): a store that goes back in time "
                "would not show. Set PPSGD_STATE_HOME to a directory that can be written",
                error,
            )
            self.note_caveat(RECORD_NOT_WRITTEN)


def _place(file: Path) -> str:
    return str(file.parent.resolve() / file.name)
