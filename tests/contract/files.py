"""Small files of users' rows, and what commands make of them."""

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.contract.command import Ended

SCRIPT = Path(sys.executable).with_name("ppsgd")
BUDGET = ("--epsilon", "8", "--delta", "1e-3")
TOML = """
population = 6
features = 5
rate = 1.0
clip-norm = 10.0
noise-multiplier = 10.0
delta = 1e-4
step = 0.5
alpha-q = 0.3
rounds = 2
evaluate-every = 1
"""

Row = dict[str, Any]


def ppsgd_alone(*arguments: str, where: Path) -> Ended:
    """The installed command in a process of its own, with all that libraries print there."""
    done = subprocess.run(
        [SCRIPT, *arguments], cwd=where, capture_output=True, text=True, timeout=600, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def check_done(ended: Ended) -> Ended:
    assert ended.status == 0, ended.out + ended.err
    return ended


def check_refused(ended: Ended, *named: str) -> None:
    """Exit status 2 and one line that names what is wrong."""
    assert ended.status == 2, ended
    assert len(ended.err.splitlines()) == 1, ended.err
    for part in named:
        assert part in ended.err


def people(users: int = 12, rows: int = 12, seed: int = 0) -> list[Row]:
    """y = 5·(user mod 6) + 2a − b, nearly without noise; a user's last 3 rows are test rows."""
    draw = np.random.default_rng(seed)
    table = []
    for user in range(users):
        for row in range(rows):
            a, b, noise = draw.normal(size=3)
            table.append(
                {
                    "user": f"u{user:02}",
                    "a": round(a, 4),
                    "b": round(b, 4),
                    "y": round(5 * (user % 6) + 2 * a - b + 0.1 * noise, 4),
                    "test": int(row >= rows - 3),
                }
            )
    return table


def write_csv(path: Path, table: Sequence[Row], sep: str = ",", decimal: str = ".") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=sep)
        writer.writerow(table[0])
        for row in table:
            writer.writerow([_cell(value, decimal) for value in row.values()])
    return path


def _cell(value: object, decimal: str) -> str:
    return str(value).replace(".", decimal) if isinstance(value, float) else str(value)


def write_parquet(path: Path, table: Sequence[Row]) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(table)), path)
    return path


def write_npz(path: Path, table: Sequence[Row], features: Sequence[str] = ("a", "b")) -> Path:
    """``user``, ``x``, ``y`` and ``test``, as the docs have it."""
    user, y, test = (np.array([row[name] for row in table]) for name in ("user", "y", "test"))
    x = np.array([[row[name] for name in features] for row in table])
    np.savez(path, user=user, x=x, y=y, test=test)
    return path


def rmse_without_features(table: Sequence[Row]) -> float:
    """Of each user's own mean over training rows, on all test rows."""
    errors = []
    for user in dict.fromkeys(row["user"] for row in table):
        own = [row for row in table if row["user"] == user]
        mean = np.mean([row["y"] for row in own if not row["test"]])
        errors += [(row["y"] - mean) ** 2 for row in own if row["test"]]
    return float(np.sqrt(np.mean(errors)))


def privacy_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "privacy.json").read_text(encoding="utf-8"))
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measured(out: Path) -> dict[str, Any]:
    """The last row of a run's metrics."""
    return rows_of(out / "metrics.jsonl")[-1]
