"""Blocks of a sweep on the cores of this machine, or on a Ray cluster. The same rows either way.

Every worker is a fresh process with one thread, so that products are summed in the same order
wherever they run.
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

from flwr_ppsgd.lab.engines.engine import reported_rounds
from flwr_ppsgd.lab.experiments.blocks import Best, Plan, plan, run_block
from flwr_ppsgd.lab.experiments.outputs import opened, write_selection
from flwr_ppsgd.lab.experiments.rows import Point, SweepRow
from flwr_ppsgd.lab.experiments.snapshot import Snapshot, clear
from flwr_ppsgd.lab.experiments.sweep import Epsilons, Sweep, with_epsilon
from flwr_ppsgd.settings import AUTO

Block: TypeAlias = Sequence[Point]
Finished: TypeAlias = tuple[int, list[SweepRow]]  # which block, and its rows
Link: TypeAlias = "Connection[Any, Any]"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
QUIET_SECONDS = 0.2  # between two words of a worker about its progress
DEFAULT_MEMORY = 4 << 30  # bytes, if the system does not say how much there is
KIBIBYTE = 1024


class Progress(Protocol):
    def __call__(self, block: int, round_: int, best: Best | None) -> None:
        """A block has come to this round.

        Args:
            block: its number.
            round_: the number of rounds it has done.
            best: its best measure there, None before the first.
        """
        ...


class Idle(Protocol):
    def __call__(self) -> bool:
        """Do some work while waiting; whether there is more."""
        ...


class Watch(Protocol):
    """Whoever is told how a sweep goes."""

    def begin(self, chosen: Plan, missing: Sequence[Block]) -> None:
        """The blocks that are going to be run."""
        ...

    def show(self, block: int, round_: int, best: Best | None) -> None:
        """As of ``Progress``."""
        ...


def run_sweep(
    sweep: Sweep,
    out: Path,
    watch: Watch,
    *,
    memory: int | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    extend: bool = False,
) -> int:
    """Run what is missing in ``out``; the number of settings that were.

    A kill loses less than a minute of work.

    Args:
        sweep: what to run.
        out: the output directory, new or of the same sweep.
        watch: is told how it goes.
        memory: the limit in bytes; None is half of what is free.
        jobs: the number of blocks at a time; None is the number of cores.
        ray: the address of a Ray cluster; None is this machine.
        extend: the grid may have grown since the sweep was begun.
    """
    proposed = plan(sweep, memory or free_memory() // 2, jobs or os.cpu_count() or 1)
    with opened(out, sweep, extend=extend) as store:
        chosen = store.plan(proposed)
        missing = store.missing(chosen.blocks)
        clear(out, missing)
        watch.begin(chosen, missing)
        epsilons = Epsilons(sweep.base)
        store.append(with_epsilon(sweep.trivial_rows(), epsilons))
        idle = _pricing(sweep, missing, epsilons)
        flat = sweep.base.to_flat()
        if ray:
            finished = on_ray(ray, flat, missing, watch.show, idle)
        else:
            finished = on_this_machine(flat, missing, chosen.jobs, watch.show, idle, directory=out)
        with closing(finished):
            for block, rows in finished:
                store.append(with_epsilon(rows, epsilons))
                Snapshot(out, missing[block]).remove()
        write_selection(out, sweep.selection())
    return sum(len(block) for block in missing)


def _pricing(sweep: Sweep, blocks: Sequence[Block], epsilons: Epsilons) -> Idle:
    """Works out one more ε at each call, while blocks are under way."""
    noises: dict[float | None, Point] = {}
    for block in blocks:
        stepped = [point for point in block if point.method != AUTO]
        noises.update({point.noise_multiplier: point for point in stepped})
    training = sweep.base.training
    rounds = reported_rounds(training.rounds, training.evaluate_every)
    pending = itertools.product(noises.values(), rounds)

    def price_one() -> bool:
        for point, round_ in pending:
            epsilons(point, round_)
            return True
        return False

    return price_one


def on_this_machine(
    flat: Mapping[str, Any],
    blocks: Sequence[Block],
    jobs: int,
    progress: Progress,
    idle: Idle,
    *,
    directory: Path,
) -> Generator[Finished]:
    """(block, its rows), as blocks finish.

    Args:
        flat: the settings of the sweep's base.
        blocks: what to run.
        jobs: the number of blocks at a time.
        progress: is told how each block goes.
        idle: work to do while waiting.
        directory: where blocks under way are saved from time to time.
    """
    waiting = list(enumerate(blocks))[::-1]
    processes: dict[Link, Any] = {}
    busy: dict[Link, int] = {}
    with _one_thread():
        try:
            while waiting or busy:
                if waiting and len(processes) < min(jobs, len(blocks)):
                    link, process = _start(flat, directory)
                    processes[link] = process
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
    """The next block, if there is one."""
    if waiting:
        number, block = waiting.pop()
        busy[link] = number
        link.send(tuple(block))


def _hear(link: Link, block: int, process: Any, progress: Progress) -> list[SweepRow] | None:
    """One message of a worker: its progress, or in the end its rows."""
    try:
        kind, content = link.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RuntimeError(
            f"the worker of block {block} ended with status {process.exitcode}: if it ran out of "
            "memory, begin anew with a lower --memory"
        ) from None
    if kind == "error":
        raise RuntimeError(f"block {block} failed: {content}")
    if kind == "progress":
        round_, best = content
        progress(block, round_, best)
        return None
    rows: list[SweepRow] = content
    return rows


def _start(flat: Mapping[str, Any], directory: Path) -> tuple[Link, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, dict(flat), directory), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _work(link: Link, flat: Mapping[str, Any], directory: Path) -> None:
    """In the worker. The parent handles Ctrl-C; if it dies, the broken pipe ends this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    last = 0.0

    def tell(round_: int, best: Best | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now > last + QUIET_SECONDS:
            last = now
            link.send(("progress", (round_, best)))

    try:
        while True:
            rows = run_block(flat, link.recv(), tell, directory)
            link.send(("rows", rows))
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
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def on_ray(
    address: str, flat: Mapping[str, Any], blocks: Sequence[Block], progress: Progress, idle: Idle
) -> Generator[Finished]:
    """The same on a Ray cluster, one core for each block; ``local`` starts one on this machine."""
    ray = _connected(address)
    try:
        remote: Callable[..., Any] = ray.remote(num_cpus=1)(run_block).remote
        busy = {remote(dict(flat), tuple(block)): number for number, block in enumerate(blocks)}
        while busy:
            more = idle()
            done, _ = ray.wait(list(busy), timeout=0 if more else None)
            for reference in done:
                rows: list[SweepRow] = ray.get(reference)
                block = busy.pop(reference)
                progress(block, max(row.round for row in rows), None)
                yield block, rows
    finally:
        ray.shutdown()


def _connected(address: str) -> Any:
    """Ray, connected to the cluster at ``address``."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ValueError("--ray needs Ray: install flwr-ppsgd[simulation]") from None
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            runtime_env={"env_vars": ONE_THREAD},
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--ray {address}: no Ray cluster there ({reason}): give its address"
        ) from None
    return ray


def free_memory() -> int:
    """Bytes that this machine, or the control group this process is in, can still give."""
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
