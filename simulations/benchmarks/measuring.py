"""How things are measured and shown."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


def show(name: str, value: float, *, at_least: float = 0.0, at_most: float = math.inf) -> None:
    """One line of the table."""
    target = f"≥ {at_least:g}" if at_least else f"≤ {at_most:g}"
    verdict = "ok" if at_least <= value <= at_most else "MISSED"
    print(f"{name:66s} {value:9.3g}   {target:6s} {verdict}", flush=True)


@dataclass(frozen=True)
class Comparison:
    """Rounds of a plain loop with one setting, and rounds of the engine with all of them.

    Args:
        loop: runs ``rounds`` rounds of the loop.
        engine: runs ``rounds`` rounds of the engine.
        settings: the number of settings that the engine trains.
        repetitions: how often the two take turns.
        rounds: the number of rounds in one turn.
    """

    loop: Callable[[], object]
    engine: Callable[[], object]
    settings: int
    repetitions: int
    rounds: int = 1


def show_against_loop(name: str, compared: Comparison, least: float) -> None:
    """The median ratio over all turns, and the median time of a round on both sides.

    Ratios are taken within a turn, since a machine that others share changes its speed from second
    to second. What only the first rounds pay (fresh memory, Gram matrices) is left out.
    """
    compared.loop()
    compared.engine()
    loop_seconds = []
    engine_seconds = []
    ratios = []
    for _ in range(compared.repetitions):
        loop_seconds.append(seconds(compared.loop))
        engine_seconds.append(seconds(compared.engine))
        ratios.append(loop_seconds[-1] / engine_seconds[-1])
    loop_ms = 1000 * statistics.median(loop_seconds) / compared.rounds
    engine_ms = 1000 * statistics.median(engine_seconds) / compared.rounds
    times = statistics.median(ratios) * compared.settings
    show(f"{name}, {loop_ms:.3g} → {engine_ms:.3g} ms", times, at_least=least)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], repetitions: int) -> float:
    """The median time of ours over that of theirs, both of the same turn."""
    return median_ratio((seconds(ours), seconds(theirs)) for _ in range(repetitions))


def median_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    return statistics.median(ours / theirs for ours, theirs in pairs)


def median_seconds(work: Callable[[], object], repetitions: int) -> float:
    """CPU seconds of a usual call."""
    return statistics.median(seconds(work) for _ in range(repetitions))


def in_a_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
