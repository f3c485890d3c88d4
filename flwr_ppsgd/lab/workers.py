"""Run the blocks of a sweep on the cores of this machine.

Every worker is a new process that computes with one thread, so that products are summed in the same
order on every machine.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from threadpoolctl import threadpool_limits

from flwr_ppsgd.lab.block import plan_blocks, run_block
from flwr_ppsgd.lab.outputs import open_sweep, write_selection
from flwr_ppsgd.lab.rows import GridPoint, SweepRow
from flwr_ppsgd.lab.sweep import EpsilonCache, Sweep

Block: TypeAlias = Sequence[GridPoint]
# called with the plan in words, the number of settings × rounds done, and their total
OnProgress: TypeAlias = Callable[[str, int, int], None]
QUIET_SECONDS = 0.2  # between two reports of a worker about its progress
DEFAULT_MEMORY = 4 << 30  # bytes, if the system does not say how much is free
KIBIBYTE = 1024
_REPORTS: list[Any] = []  # in a worker, the queue of its progress


def run_sweep(
    sweep: Sweep,
    out: Path,
    on_progress: OnProgress | None = None,
    *,
    memory: int | None = None,
    jobs: int | None = None,
    extend: bool = False,
) -> int:
    """Run the blocks that are missing in ``out``, and return the number of their settings.

    A kill loses the blocks that are running.

    Args:
        sweep: what to run.
        out: the output directory, new or of the same sweep.
        on_progress: shows the progress.
        memory: the limit in bytes; None: half of what is free.
        jobs: the number of blocks at a time; None: the number of cores.
        extend: the grid may have grown since the sweep was begun.
    """
    proposed = plan_blocks(sweep, memory or free_memory() // 2, jobs or os.cpu_count() or 1)
    rounds = sweep.base.training.rounds
    with open_sweep(out, sweep, extend=extend) as store:
        plan = store.plan(proposed)
        missing = store.unfinished_blocks(plan.blocks)
        left = [rounds * len(block) for block in missing]
        total = rounds * sum(len(block) for block in plan.blocks)

        def show(number: int, round_: int) -> None:
            left[number] = (rounds - round_) * len(missing[number])
            if on_progress:
                on_progress(str(plan), total - sum(left), total)

        if on_progress:
            on_progress(str(plan), total - sum(left), total)
        epsilons = EpsilonCache(sweep.base)
        store.append(epsilons.with_epsilon(sweep.trivial_rows()))
        with closing(run_in_processes(sweep.base.to_flat(), missing, plan.jobs, show)) as finished:
            for number, rows in finished:
                store.append(epsilons.with_epsilon(rows))
                show(number, rounds)
        write_selection(out, sweep.selection())
    return sum(len(block) for block in missing)


def run_in_processes(
    flat: Mapping[str, Any],
    blocks: Sequence[Block],
    jobs: int,
    on_round: Callable[[int, int], None],
) -> Generator[tuple[int, list[SweepRow]]]:
    """(the number of a block, its rows), as blocks finish.

    Args:
        flat: the settings of the sweep's base.
        blocks: what to run.
        jobs: the number of blocks at a time.
        on_round: called with the number of a block and the number of its rounds done.
    """
    context = multiprocessing.get_context("spawn")
    reports: Any = context.SimpleQueue()
    stop_reader, stop_writer = context.Pipe(duplex=False)
    workers = max(1, min(jobs, len(blocks)))
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (reports, stop_reader))
    try:
        pending = {}
        for number, block in enumerate(blocks):
            pending[pool.submit(_run_in_worker, dict(flat), tuple(block), number)] = number
        while pending:
            done, _ = wait(pending, timeout=QUIET_SECONDS, return_when=FIRST_COMPLETED)
            while not reports.empty():
                on_round(*reports.get())
            for future in done:
                number = pending.pop(future)
                yield number, _rows_from(future, number)
    finally:
        stop_writer.close()  # ends the workers at once
        pool.shutdown(cancel_futures=True)


def _rows_from(future: "Future[list[SweepRow]]", number: int) -> list[SweepRow]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"a worker ended without a word while block {number} was waited for: if it ran out of "
            "memory, begin anew with a lower --memory"
        ) from None
    except Exception as error:
        raise RuntimeError(f"block {number} failed: {type(error).__name__}: {error}") from error


def _begin_worker(reports: Any, stop: Any) -> None:
    """Set up a new worker: one thread, no Ctrl-C, warnings only; it ends if the parent closes
    ``stop`` or dies."""

    def end_with_parent() -> None:
        try:
            stop.recv()
        except EOFError:
            os._exit(1)

    logging.getLogger("flwr").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threadpool_limits(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _REPORTS.append(reports)


def _run_in_worker(flat: Mapping[str, Any], points: Block, number: int) -> list[SweepRow]:
    """Run one block in a worker, which reports its progress a few times a second."""
    (reports,) = _REPORTS
    last = 0.0

    def report(round_: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + QUIET_SECONDS:
            last = now
            reports.put((number, round_))

    return run_block(flat, points, report)


def free_memory() -> int:
    """The smaller of this machine's available memory and its control group's limit, in bytes."""
    limits = [
        _first_number("/proc/meminfo", "MemAvailable:", KIBIBYTE),
        _first_number("/sys/fs/cgroup/memory.max", "", 1),
    ]
    return min([limit for limit in limits if limit is not None], default=DEFAULT_MEMORY)


def _first_number(path: str, word: str, unit: int) -> int | None:
    """The number after ``word`` in a file; None on another system, or if there is no limit."""
    try:
        lines = Path(path).read_text().splitlines()
        line = next(line for line in lines if word in line)
        number, *_ = line.removeprefix(word).split()
        return int(number) * unit
    except (OSError, ValueError, StopIteration):
        return None
