"""A block under way, on disk: a sweep that was killed goes on from there, with the same rows."""

import hashlib
import json
import logging
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from flwr_ppsgd import disk
from flwr_ppsgd.lab.engines.engine import Engine
from flwr_ppsgd.lab.experiments.rows import Point, SweepRow

log = logging.getLogger("flwr.ppsgd")

EVERY_SECONDS = 20.0
SHARE = 20  # saving takes at most one part in this number of the time
PREFIX = ".block-"
FORMAT = 2  # of engines' states: files of another format are not taken up
TOLD = "told"  # the array that holds rows and first errors, as JSON


class Snapshot:
    """The state of one block's engine with the rows so far and the first errors, in one file.

    Args:
        directory: of the sweep.
        points: the block's settings, which decide the name of the file.
    """

    def __init__(self, directory: Path, points: Sequence[Point]) -> None:
        keys = [point.key() for point in points]
        digest = hashlib.sha256(json.dumps([FORMAT, keys]).encode()).hexdigest()
        self.path = directory / f"{PREFIX}{digest[:16]}.npz"
        self._due = time.monotonic() + EVERY_SECONDS

    def resume(self, engine: Engine) -> tuple[list[SweepRow], dict[int, float]]:
        """Bring the engine to where it was; the rows and first errors of then.

        Without a whole file the engine stays as it is, and there are none.
        """
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                state = dict(kept)
            told, first = json.loads(state.pop(TOLD).tobytes())
            rows = [SweepRow.from_json(flat) for flat in told]
        except FileNotFoundError:
            return [], {}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            log.warning("%s cannot be read (%s): its block begins anew", self.path, error)
            return [], {}
        engine.restore(state)
        return rows, {int(place): error for place, error in first.items()}

    def save_when_due(
        self, engine: Engine, rows: Sequence[SweepRow], first: dict[int, float]
    ) -> None:
        """Write the file if it is time; it appears complete or not at all."""
        begun = time.monotonic()
        if begun < self._due:
            return
        told = json.dumps([[row.to_json() for row in rows], first])
        arrays = {TOLD: np.frombuffer(told.encode(), np.uint8), **engine.state()}
        try:
            with disk.replacing(self.path, sync=False) as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        except OSError as error:
            log.warning("%s cannot be written (%s): a kill would lose this block", self.path, error)
        ended = time.monotonic()
        self._due = ended + max(EVERY_SECONDS, SHARE * (ended - begun))

    def remove(self) -> None:
        """The block is finished."""
        self.path.unlink(missing_ok=True)


def clear(directory: Path, keep: Iterable[Sequence[Point]]) -> None:
    """Remove what a kill has left behind, except for the blocks that will be taken up."""
    kept = {Snapshot(directory, points).path for points in keep}
    for path in directory.glob(f"{PREFIX}*"):
        if path not in kept:
            path.unlink(missing_ok=True)
