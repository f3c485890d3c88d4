"""Blocks of a sweep on the cores of this machine, or on a Ray cluster. The same rows either way.

Every worker is a fresh process with one thread, so that products are summed in the same order wherever they run.
"""

import importlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from flwr_ppsgd.experiments.outputs import opened
from flwr_ppsgd.experiments.snapshot import Snapshot, clear
from flwr_ppsgd.experiments.sweep import (
    Best,
    Epsilons,
    Plan,
    Point,
    Row,
    Sweep,
    keys_of,
    plan,
    run_block,
    with_epsilon,
)
from flwr_ppsgd.simulation.linear import reported_rounds

Block: TypeAlias = Sequence[Point]
Link: TypeAlias = "Connection[Any, Any]"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
QUIET_SECONDS = 0.2  # between two words of a worker about its progress


class Progress(Protocol):
    def __call__(self, block: int, round_: int, best: Best | None) -> None:
        """A block has come to this round; ``best`` is its best measure there, None before the first."""
        ...


class Idle(Protocol):
    def __call__(self) -> bool:
        """Do some work while waiting; whether there is more."""
        ...


def on_this_machine(
    flat: Mapping[str, Any], blocks: Sequence[Block], jobs: int, progress: Progress, idle: Idle, *, directory: Path
) -> Generator[tuple[int, list[Row]]]:
    """(block, its rows), as blocks finish; those under way are saved in ``directory`` from time to time."""
    waiting = list(enumerate(blocks))[::-1]
    processes: dict[Link, Any] = {}
    busy: dict[Link, int] = {}
    with _one_thread():
        try:
            while waiting or busy:
                if waiting and len(processes) < min(jobs, len(blocks)):
                    link, processes[link] = _start(flat, directory)
                    _give(link, waiting, busy)
                    continue
                more = idle()
                for ready in wait(list(busy), timeout=0 if more else None):
                    link = cast(Link, ready)
                    rows = _hear(link, busy[link], processes[link], progress)
                    if rows is not None:
                        block = busy.pop(link)
                        _give(link, waiting, busy)
                        yield block, rows
        finally:
            for link, process in processes.items():
                process.terminate()
                process.join()
                link.close()


def _give(link: Link, waiting: list[tuple[int, Block]], busy: dict[Link, int]) -> None:
    """The next block, where there is one."""
    if waiting:
        busy[link], block = waiting.pop()
        link.send(tuple(block))


def _hear(link: Link, block: int, process: Any, progress: Progress) -> list[Row] | None:
    """One message of a worker: its progress, or in the end its rows."""
    try:
        kind, content = link.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RuntimeError(
            f"the worker of block {block} ended with status {process.exitcode}: if it ran out of memory, begin anew "
            "with a lower --memory"
        ) from None
    if kind == "error":
        raise RuntimeError(f"block {block} failed: {content}")
    if kind == "progress":
        progress(block, *content)
        return None
    rows: list[Row] = content
    return rows


def _start(flat: Mapping[str, Any], directory: Path) -> tuple[Link, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, dict(flat), directory), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _work(link: Link, flat: Mapping[str, Any], directory: Path) -> None:
    """In the worker. Ctrl-C is for the parent to handle; a parent that has died breaks the pipe, which ends this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    last = 0.0

    def tell(round_: int, best: Best | None) -> None:
        nonlocal last
        if time.monotonic() > last + QUIET_SECONDS:
            last = time.monotonic()
            link.send(("progress", (round_, best)))

    try:
        while True:
            link.send(("rows", run_block(flat, link.recv(), tell, directory)))
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        link.send(("error", f"{type(error).__name__}: {error}"))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes started meanwhile compute with one thread each."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def on_ray(
    address: str, flat: Mapping[str, Any], blocks: Sequence[Block], progress: Progress, idle: Idle
) -> Generator[tuple[int, list[Row]]]:
    """The same on an existing Ray cluster, one core a block; ``local`` starts one on this machine."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ValueError("--ray needs Ray: install flwr-ppsgd[simulation]") from None
    try:
        ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": ONE_THREAD}, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray {address}: no Ray cluster there ({str(error).splitlines()[0]}): give its address"
        ) from None
    try:
        remote: Callable[..., Any] = ray.remote(num_cpus=1)(run_block).remote
        busy = {remote(dict(flat), tuple(block)): number for number, block in enumerate(blocks)}
        while busy:
            more = idle()
            done, _ = ray.wait(list(busy), timeout=0 if more else None)
            for reference in done:
                rows: list[Row] = ray.get(reference)
                block = busy.pop(reference)
                progress(block, max(row["round"] for row in rows), None)
                yield block, rows
    finally:
        ray.shutdown()


class Watch(Protocol):
    """Who is told how a sweep goes."""

    def begin(self, chosen: Plan, missing: Sequence[Block]) -> None: ...

    def show(self, block: int, round_: int, best: Best | None) -> None: ...


def run_sweep(
    sweep: Sweep, out: Path, watch: Watch, *, memory: int | None = None, jobs: int | None = None, ray: str | None = None
) -> int:
    """Run what is missing in ``out``; the number of settings that were. A kill loses less than a minute of work."""
    proposed = plan(sweep, memory or free_memory() // 2, jobs or os.cpu_count() or 1)
    with opened(out, sweep) as store:
        chosen = store.plan(proposed)
        missing = store.missing(chosen.blocks)
        clear(out, map(keys_of, missing))
        watch.begin(chosen, missing)
        epsilons = Epsilons(sweep.base)
        flat, idle = sweep.base.to_flat(), _pricing(sweep, missing, epsilons)
        if ray:
            finished = on_ray(ray, flat, missing, watch.show, idle)
        else:
            finished = on_this_machine(flat, missing, chosen.jobs, watch.show, idle, directory=out)
        with closing(finished):
            for block, rows in finished:
                store.append(with_epsilon(rows, epsilons))
                Snapshot(out, keys_of(missing[block])).remove()
    return sum(map(len, missing))


def _pricing(sweep: Sweep, blocks: Sequence[Block], epsilons: Epsilons) -> Idle:
    """Works out one more ε at each call, while blocks are under way."""
    noises = {point.noise_multiplier: point for block in blocks for point in block}
    pending = itertools.product(noises.values(), reported_rounds(sweep.base.rounds, sweep.base.evaluate_every))

    def price_one() -> bool:
        for point, round_ in pending:
            epsilons(point, round_)
            return True
        return False

    return price_one


def free_memory() -> int:
    """Bytes that this machine, or the control group this process is in, can still give."""
    limits = []
    for path, word in (("/proc/meminfo", "MemAvailable:"), ("/sys/fs/cgroup/memory.max", "")):
        try:
            lines = [line.removeprefix(word).split() for line in Path(path).read_text().splitlines() if word in line]
            limits.append(int(lines[0][0]) * (1024 if word else 1))
        except (OSError, ValueError, IndexError):  # not this system, or no limit
            continue
    return min(limits, default=4 << 30)
