"""A block under way, on disk: a sweep that was killed goes on from there, and ends with the same rows."""

import hashlib
import json
import logging
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from flwr_ppsgd.simulation.linear import Engine

log = logging.getLogger("flwr.ppsgd")

EVERY_SECONDS = 20.0
SHARE = 20  # saving takes at most one part in so many of the time
Keys: TypeAlias = Sequence[dict[str, Any]]


class Snapshot:
    """The state of one block's engine with the rows so far and the first errors, in one file.

    keys: of the block's settings; they decide the name of the file.
    """

    def __init__(self, directory: Path, keys: Keys) -> None:
        name = hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16]
        self.path = directory / f".block-{name}.npz"
        self._due = time.monotonic() + EVERY_SECONDS

    def resume(self, engine: Engine) -> tuple[list[dict[str, Any]], dict[int, float]]:
        """Bring the engine to where it was; the rows and first errors of then. Nothing where there is no whole file."""
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                state = dict(kept)
            rows, first = json.loads(state.pop("told").tobytes())
        except FileNotFoundError:
            return [], {}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log.warning("%s cannot be read (%s): its block begins anew", self.path, error)
            return [], {}
        engine.restore(state)
        return rows, {int(place): error for place, error in first.items()}

    def save_when_due(self, engine: Engine, rows: Sequence[dict[str, Any]], first: dict[int, float]) -> None:
        """The file appears complete or not at all."""
        begun = time.monotonic()
        if begun < self._due:
            return
        told = np.frombuffer(json.dumps([rows, first]).encode(), np.uint8)
        temporary = self.path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                np.savez(file, told=told, **engine.state())  # type: ignore[arg-type]
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            log.warning("%s cannot be written (%s): a kill would lose this block", self.path, error)
        spent = time.monotonic() - begun
        self._due = time.monotonic() + max(EVERY_SECONDS, SHARE * spent)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def clear(directory: Path, keep: Iterable[Keys]) -> None:
    """Remove what a kill has left behind, but for the blocks that will be taken up."""
    kept = {Snapshot(directory, keys).path for keys in keep}
    for path in directory.glob(".block-*"):
        if path not in kept:
            path.unlink(missing_ok=True)
