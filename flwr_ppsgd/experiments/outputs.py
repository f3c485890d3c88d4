"""The directory of a sweep: its settings, its blocks, and rows that are only ever appended.

A finished block is one write and one fsync. A kill at any moment leaves whole rows and at most one torn line, which the
next run cuts off; rows of a block that is not complete are recognised and not written twice.
"""

import fcntl
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from flwr_ppsgd.experiments.run import check_free
from flwr_ppsgd.experiments.sweep import Plan, Point, Row, Sweep, is_last

CONFIG, PLAN, ROWS, LOCK = "config.toml", "plan.json", "rows.jsonl", ".lock"


@contextmanager
def opened(out: Path, sweep: Sweep) -> Iterator["Store"]:
    """The store of this sweep, new or begun before, for this process alone."""
    if not (out / CONFIG).exists() and not _only_begun(out):
        check_free(out)
    out.mkdir(exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out}: another sweep is writing here: wait for it, or choose another --out") from None
        _settle(out / CONFIG, sweep)
        yield Store(out, sweep)


def _only_begun(out: Path) -> bool:
    """A sweep that was killed before it wrote its settings."""
    return out.is_dir() and {path.name for path in out.iterdir()} == {LOCK}


def _settle(config: Path, sweep: Sweep) -> None:
    """Write the settings, or compare them with those that are there."""
    flat = sweep.to_flat()
    if not config.exists():
        replace_text(config, tomli_w.dumps(flat))
        return
    there = read_config(config.parent)
    for key in sorted(flat.keys() | there.keys()):
        if flat.get(key) != there.get(key):
            raise ValueError(
                f"{config.parent} holds the results of another experiment: its {key} is {there.get(key)}, here it is "
                f"{flat.get(key)}: choose another --out"
            )


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of the sweep in a directory, as written there."""
    path = directory / CONFIG
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}: give the --out directory of a sweep") from None


def read_rows(directory: Path) -> list[Row]:
    """Every whole row; a torn last line is left out."""
    path = directory / ROWS
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [_parsed(line, number, path) for number, line in enumerate(whole.splitlines(), 1)]


def _parsed(line: bytes, number: int, path: Path) -> Row:
    try:
        row: Row = json.loads(line)
        Point.of(row)
        row["round"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: line {number} is not a row of a sweep ({error!r}): restore the file") from None
    return row


class Store:
    """An open directory."""

    def __init__(self, out: Path, sweep: Sweep) -> None:
        self._out, self._rounds = out, sweep.base.rounds
        rows = read_rows(out)
        self._keys = {_key(row) for row in rows}
        self._finished = {Point.of(row) for row in rows if is_last(row, self._rounds)}
        if (out / ROWS).exists():
            _cut_torn_line(out / ROWS)

    def plan(self, proposed: Plan) -> Plan:
        """The plan this directory was begun with, or ``proposed`` from now on: blocks decide the last digits."""
        path = self._out / PLAN
        if not path.exists():
            keys = [[point.key() for point in block] for block in proposed.blocks]
            replace_text(path, json.dumps({"bytes": proposed.bytes, "blocks": keys}) + "\n")
            return proposed
        kept = json.loads(path.read_text(encoding="utf-8"))
        blocks = tuple(tuple(Point.of(key) for key in block) for block in kept["blocks"])
        if kept["bytes"] > proposed.limit:
            raise ValueError(
                f"{self._out} was begun with blocks of {kept['bytes'] / 1e6:.0f} MB and the limit is now "
                f"{proposed.limit / 1e6:.0f} MB: raise --memory, or begin anew with another --out"
            )
        jobs = max(1, min(proposed.jobs, len(blocks), proposed.limit // kept["bytes"]))
        return Plan(blocks, jobs, kept["bytes"], proposed.limit)

    def missing(self, blocks: Iterable[Sequence[Point]]) -> list[Sequence[Point]]:
        """The blocks that are not complete."""
        return [block for block in blocks if not set(block) <= self._finished]

    def append(self, rows: Iterable[Row]) -> None:
        """Those rows that are not there yet, in one write, on disk when this returns."""
        new = [row for row in rows if _key(row) not in self._keys]
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in new).encode()
        with (self._out / ROWS).open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        self._keys |= {_key(row) for row in new}
        self._finished |= {Point.of(row) for row in new if is_last(row, self._rounds)}


def _key(row: Row) -> tuple[Point, int]:
    return Point.of(row), int(row["round"])


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        whole, newline, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole) + len(newline))
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """The file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
