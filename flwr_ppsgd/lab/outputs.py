"""The output directories of runs and sweeps: the only place that knows the names of their files.

The directory of a run appears complete or not at all. The directory of a sweep grows: a finished
block is one write and one sync. A kill at any moment leaves whole rows and at most one torn line,
which the next start removes; rows of an incomplete block are recognised and not written twice.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from flwr_ppsgd.database import FileLock
from flwr_ppsgd.lab import disk
from flwr_ppsgd.lab.problem import SYNTHETIC
from flwr_ppsgd.lab.rows import GRID, GridPoint, RunRow, Selection, SweepRow
from flwr_ppsgd.settings import read_toml
from flwr_ppsgd.statement import json_number, with_conditions
from flwr_ppsgd.wire import SCHEMA_HASH

if TYPE_CHECKING:
    import pandas as pd

    from flwr_ppsgd.lab.block import BlockPlan
    from flwr_ppsgd.lab.run import RunOutcome
    from flwr_ppsgd.lab.sweep import Sweep

RUNS = Path("runs")
CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PRIVACY = "privacy.json"
MODEL = "model.npz"
USERS = "users.parquet"
USERS_OUTSIDE = "one row per user, measured on own test rows: outside the guarantee"
PICTURE = "learning.png"
USERS_PICTURE = "users.png"
PLAN = "plan.json"
ROWS = "rows.jsonl"
BEST = "best.csv"  # a row for each noise level
SELECTION = "selection.json"
PAGE = "report.html"
LOCK = ".lock"
READABLE_FOLDER = 0o755  # a temporary directory is for its owner alone


def free_directory(name: str) -> Path:
    """``runs/NAME``, or ``runs/NAME-2`` and so on if that is taken."""
    candidate = RUNS / name
    number = 2
    while candidate.exists():
        candidate = RUNS / f"{name}-{number}"
        number += 1
    return candidate


def check_free(out: Path) -> None:
    """Refuse, before any work, a directory that is not empty or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already holds something: choose another directory with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written ({error.strerror}): choose another directory with --out"
        ) from None


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of the run or sweep in a directory, as they were written there."""
    return read_toml(directory / CONFIG, remedy="give the --out directory of a sweep")


# --- runs


def save(outcome: "RunOutcome", out: Path) -> None:
    """Write the output directory of a run, pictures included, in one move.

    Args:
        outcome: the run.
        out: a new directory, or an empty one.
    """
    from flwr_ppsgd.lab.figures import draw_run

    check_free(out)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write_run(outcome, temporary)
        draw_run(read_run(temporary))
        if out.exists():  # an empty directory of the user's, perhaps the current one
            for path in temporary.iterdir():
                os.replace(path, out / path.name)
        else:
            temporary.chmod(READABLE_FOLDER)
            os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_run(outcome: "RunOutcome", directory: Path) -> None:
    experiment = outcome.experiment
    config = experiment.to_flat()
    if not experiment.training.automatic:
        config["noise-multiplier"] = outcome.release.noise_multiplier
        config.pop("epsilon", None)
    disk.write_text(directory / CONFIG, tomli_w.dumps(config))
    rows = [json.dumps(row.to_json()) + "\n" for row in outcome.rows]
    disk.write_text(directory / METRICS, "".join(rows))
    data = with_conditions(outcome.privacy_data(), experiment.conditions())
    privacy = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    disk.write_text(directory / PRIVACY, privacy + "\n")
    with disk.open_replacement(directory / MODEL) as file:
        np.savez(file, **_published_arrays(outcome))  # type: ignore[arg-type]
    if outcome.people:
        _write_people(outcome, directory / USERS)


def _published_arrays(outcome: "RunOutcome") -> dict[str, NDArray[Any]]:
    """w, what the recipe publishes beside it, and the hash of the schema of own data.

    Parameters of a network have their own names; those of a linear model, which have none, are "w".
    """
    arrays = {name: array.numpy() for name, array in outcome.w.items()}
    if len(arrays) == 1:
        arrays = {"w": outcome.w.to_numpy_ndarrays()[0]}
    arrays |= outcome.beside
    problem = outcome.experiment.problem
    if problem.data != SYNTHETIC:
        digest = bytes.fromhex(problem.written_schema().sha256)
        arrays[SCHEMA_HASH] = np.frombuffer(digest, dtype=np.uint8)
    return arrays


def _write_people(outcome: "RunOutcome", path: Path) -> None:
    """One row per user: measures, gain over own rows alone, and choices."""
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    names = outcome.experiment.problem.per_user().users
    records = []
    for person in outcome.people:
        record: dict[str, Any] = {"user": str(names[person.user]), "test_rows": person.weight}
        record |= {"gain": person.gain, **person.measures}
        record |= {f"chosen-{name}": value for name, value in person.chosen.items()}
        records.append(record)
    table = pa.Table.from_pandas(pd.DataFrame(records), preserve_index=False)
    with disk.open_replacement(path) as file:
        parquet.write_table(table.replace_schema_metadata({"guarantee": USERS_OUTSIDE}), file)


def read_model(directory: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a run's w, by name."""
    try:
        with np.load(directory / MODEL, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory / MODEL}: cannot be read ({error}): give the --out of ppsgd run"
        ) from None


@dataclass(frozen=True)
class SavedRun:
    """The directory of a run.

    Args:
        directory: where it is.
        config: its settings.
        rounds_trained: the number of rounds that w was trained.
        statement: the privacy statement, line by line.
        rows: one for each evaluated round.
        privacy: everything that ``privacy.json`` holds.
        people: one row per user, from ``users.parquet``; empty if only means over users were
            measured.
    """

    directory: Path
    config: dict[str, Any]
    rounds_trained: int
    statement: list[str]
    rows: list[RunRow]
    privacy: dict[str, Any]
    people: "pd.DataFrame"

    def last_measures(self) -> Mapping[str, float]:
        """The measures of the last evaluated round; empty if there are none."""
        measured = [row.measures for row in self.rows if row.measures]
        return measured[-1] if measured else {}


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run, and not of a sweep."""
    return (directory / PRIVACY).exists()


def read_run(directory: Path) -> SavedRun:
    """The content of a run's directory; ValueError if it is not one."""
    import pandas as pd

    config = read_config(directory)
    people = pd.DataFrame()
    if (directory / USERS).exists():
        people = pd.read_parquet(directory / USERS)
    try:
        privacy = json.loads((directory / PRIVACY).read_text(encoding="utf-8"))
        lines = (directory / METRICS).read_text(encoding="utf-8").splitlines()
        return SavedRun(
            directory=directory,
            config=config,
            rounds_trained=int(privacy["rounds_trained"]),
            statement=privacy["statement"].splitlines(),
            rows=[RunRow.from_json(json.loads(line)) for line in lines],
            privacy=privacy,
            people=people,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{directory}: not the directory of a run ({error!r}): give the --out of ppsgd run"
        ) from None


# --- sweeps


@contextmanager
def open_sweep(out: Path, sweep: "Sweep", *, extend: bool = False) -> Iterator["SweepStore"]:
    """The store of this sweep, new or begun before, locked by this process.

    Args:
        out: its directory.
        sweep: the sweep.
        extend: the grid may have grown since the sweep was begun.
    """
    if not (out / CONFIG).exists() and not _only_begun(out):
        check_free(out)
    out.mkdir(exist_ok=True)
    busy = f"{out}: another sweep is writing here: wait for it, or choose another --out"
    with closing(FileLock(out / LOCK, 0.0, busy)):
        _check_same_settings(out, sweep.to_flat(), GRID if extend else ())
        yield SweepStore(out, sweep.base.training.rounds)


def _only_begun(out: Path) -> bool:
    """Whether a sweep was killed here before it had written its settings."""
    if not out.is_dir():
        return False
    names = {path.name for path in out.iterdir() if not path.name.startswith(CONFIG)}
    return names == {LOCK}


def _check_same_settings(out: Path, flat: Mapping[str, Any], growing: Sequence[str]) -> None:
    """Write the settings, or compare them with those written before, apart from growing lists."""
    if (out / CONFIG).exists():
        there = read_config(out)
        for key in sorted((flat.keys() | there.keys()) - set(growing)):
            if flat.get(key) != there.get(key):
                raise ValueError(
                    f"{out} holds the results of another experiment: its {key} is "
                    f"{there.get(key)}, here it is {flat.get(key)}: choose another --out"
                )
        if not growing:
            return
    disk.write_text(out / CONFIG, tomli_w.dumps(flat))


def read_rows(directory: Path) -> list[SweepRow]:
    """Every whole row of a sweep; a torn last line is left out."""
    path = directory / ROWS
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(SweepRow.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: line {number} is not a row of a sweep ({error!r}): restore the file"
            ) from None
    return rows


def finished_rows(directory: Path) -> list[SweepRow]:
    """The rows of a sweep; ValueError if there are none yet."""
    rows = read_rows(directory)
    if not rows:
        raise ValueError(
            f"{directory}: no setting is finished yet: run ppsgd sweep --out {directory}"
        )
    return rows


class SweepStore:
    """The open directory of a sweep.

    Args:
        out: the directory.
        rounds: the planned number of rounds.
    """

    def __init__(self, out: Path, rounds: int) -> None:
        self._out = out
        self._rounds = rounds
        self._known: set[tuple[GridPoint, int]] = set()
        self._finished: set[GridPoint] = set()
        self._remember(read_rows(out))
        if (out / ROWS).exists():
            disk.cut_torn_line(out / ROWS)

    def _remember(self, rows: Iterable[SweepRow]) -> None:
        for row in rows:
            self._known.add((row.point, row.round))
            if row.is_last(self._rounds):
                self._finished.add(row.point)

    def plan(self, proposed: "BlockPlan") -> "BlockPlan":
        """The plan this directory was begun with, with blocks for settings that were added since;
        or ``proposed`` from now on.

        Which settings stand side by side decides the last digits of their rows.
        """
        path = self._out / PLAN
        size = proposed.bytes
        blocks = list(proposed.blocks)
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            blocks = [tuple(GridPoint.of(key) for key in keys) for keys in kept["blocks"]]
            there = {point for block in blocks for point in block}
            size = kept["bytes"]
            for block in proposed.blocks:
                added = tuple(point for point in block if point not in there)
                if added:
                    blocks.append(added)
                    size = max(size, proposed.bytes)
        if size > proposed.limit:
            raise ValueError(
                f"{self._out} was begun with blocks of {size / 1e6:.0f} MB and the limit is now "
                f"{proposed.limit / 1e6:.0f} MB: raise --memory, or begin anew with another --out"
            )
        keys = [[point.key() for point in block] for block in blocks]
        disk.write_text(path, json.dumps({"bytes": size, "blocks": keys}) + "\n")
        jobs = max(1, min(proposed.jobs, len(blocks), proposed.limit // size))
        return replace(proposed, blocks=tuple(blocks), jobs=jobs, bytes=size)

    def unfinished_blocks(self, blocks: Iterable[Sequence[GridPoint]]) -> list[Sequence[GridPoint]]:
        """The blocks that are not complete."""
        return [block for block in blocks if not set(block) <= self._finished]

    def append(self, rows: Iterable[SweepRow]) -> None:
        """Write the rows that are new in one write, and sync it."""
        new = []
        text = ""
        for row in rows:
            if (row.point, row.round) not in self._known:
                new.append(row)
                text += json.dumps(row.to_json(), allow_nan=False) + "\n"
        disk.append(self._out / ROWS, text.encode())
        self._remember(new)


def planned_settings(directory: Path) -> int | None:
    """The number of settings in the plan of a sweep; None if it was not written yet."""
    path = directory / PLAN
    if not path.exists():
        return None
    plan = json.loads(path.read_text(encoding="utf-8"))
    return sum(len(block) for block in plan["blocks"])


def write_selection(directory: Path, costs: Iterable[Selection]) -> None:
    """``selection.json``: what choosing among the settings of each noise level costs."""
    rows = [{key: json_number(value) for key, value in asdict(cost).items()} for cost in costs]
    disk.write_text(directory / SELECTION, json.dumps(rows, indent=2) + "\n")


def read_selection(directory: Path) -> list[Selection]:
    """What choosing costs; empty if it was not written yet."""
    path = directory / SELECTION
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [Selection(**row) for row in rows]
