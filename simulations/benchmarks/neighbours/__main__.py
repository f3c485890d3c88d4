"""``make bench-neighbours``, or ``python -m simulations.benchmarks.neighbours --pfl PYTHON --fedjax
PYTHON`` with interpreters that have these libraries. A side without an interpreter is left out."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = "simulations.benchmarks.neighbours"
WARMING = 50  # rounds; also tells how many make a turn
REST_SECONDS = 0.1  # before a turn: threads of the side before may still be spinning
TURN_SECONDS = 0.4  # short: the speed of a shared machine changes within seconds
SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class Side:
    """What is measured.

    Args:
        name: for the table.
        module: of this folder, and its arguments.
        needs: the library whose interpreter runs it; None: this interpreter.
        settings: the number of settings that one round trains.
        short: the head of its column; empty if it has none.
    """

    name: str
    module: tuple[str, ...]
    needs: str | None = None
    settings: int = 1
    short: str = ""


OURS = (
    Side("ours, Flower's messages in one process", ("own_side", "messages"), short="messages"),
    Side("ours, cohort engine, one setting", ("own_side", "one"), short="engine"),
    Side(
        "ours, cohort engine, 63 settings side by side",
        ("own_side", "many"),
        settings=63,
        short="63 settings",
    ),
)
SIDES = (
    *OURS,
    Side("a plain loop in NumPy", ("own_side", "loop")),
    Side("pfl, a model in NumPy", ("pfl_side", "numpy"), needs="pfl"),
    Side("pfl, its model for torch", ("pfl_side", "torch"), needs="pfl"),
    Side("fedjax, for_each_client by jit, no privacy", ("fedjax_side",), needs="fedjax"),
)


class Process:
    """One side, running."""

    def __init__(self, side: Side, python: str, running: ExitStack) -> None:
        self.side = side
        module, *arguments = side.module
        self._process = running.enter_context(
            subprocess.Popen(
                [python, "-W", "ignore", "-m", f"{PACKAGE}.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)},
            )
        )
        self.versions = self._answer()
        self.seconds(WARMING)
        a_round = self.seconds(WARMING) / WARMING
        self._rounds = max(1, round(TURN_SECONDS / a_round))

    def speed(self) -> float:
        """Rounds per CPU second in one turn, times the number of settings."""
        return self.side.settings * self._rounds / self.seconds(self._rounds)

    def seconds(self, rounds: int) -> float:
        """CPU seconds of this number of rounds."""
        time.sleep(REST_SECONDS)
        assert self._process.stdin is not None
        print(rounds, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.side.name}: ended, see its error above")
        return line.strip()


def main() -> None:
    asked = arguments()
    interpreters = {None: sys.executable, "pfl": asked.pfl, "fedjax": asked.fedjax}
    with ExitStack() as running:
        processes = []
        for side in SIDES:
            python = interpreters[side.needs]
            if python is None:
                print(f"left out: {side.name} (no --{side.needs} PYTHON)", flush=True)
            else:
                processes.append(Process(side, python, running))
        turns = []
        for _ in range(asked.turns):
            turns.append({process.side: process.speed() for process in processes})
    versions = {process.versions for process in processes}
    print(f"{'; '.join(sorted(versions))}; medians of {asked.turns} turns\n")
    show(turns)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}")
    parser.add_argument("--pfl", metavar="PYTHON", help="an interpreter that has pfl")
    parser.add_argument("--fedjax", metavar="PYTHON", help="an interpreter that has fedjax")
    parser.add_argument("--turns", type=int, default=31, help="how often sides take turns")
    return parser.parse_args()


def show(turns: Sequence[dict[Side, float]]) -> None:
    """Speeds, and each of ``OURS`` over them: medians over turns of the ratio within a turn."""
    heads = "".join(f"{side.short:>12s}" for side in OURS)
    print(f"{'':48s}{'setting-rounds':>16s}{'  the speed of … over it':s}")
    print(f"{'':48s}{'per CPU second':>16s}{heads}")
    for side in turns[0]:
        speed = statistics.median(turn[side] for turn in turns)
        line = f"{side.name:48s}{speed:16.4g}"
        for own in OURS:
            line += f"{statistics.median(turn[own] / turn[side] for turn in turns):12.3g}"
        print(line)


if __name__ == "__main__":
    main()
