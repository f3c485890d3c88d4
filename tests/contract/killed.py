"""A process that trains in children of its own, which import nothing anew, and ends them early.

``python -m tests.contract.killed kills|limits|hold DIRECTORY`` prints what happens, a line of JSON
for each event.
"""

import functools
import hashlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd import client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.targets import USERS, Target, flat, strategy

LARGE = 20_000  # parameters: writing w takes a moment, and 160 kB
KILLS = 24
FOR_EVER = 10**6
LIMITS = [0, 50, 300, 5000, 60_000, 100_000, 400_000]  # bytes
PATIENCE = 60.0  # seconds, for a slow machine

Note = Callable[[str, int], None]


def say(event: str, **facts: Any) -> None:
    """One line in one write: whoever says it may be killed at any moment."""
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())


def learner_for(context: Context) -> Target:  # noqa: ARG001
    return Target(np.ones(LARGE))


def train(directory: Path, rounds: int, note: Note | None = None) -> None:
    """Train up to this round, and say where it goes on and each publication."""
    ppsgd = strategy(checkpoint_dir=directory / "server")
    event = "resumed"

    def look(round_: int, w: ArrayRecord) -> None:
        nonlocal event
        say(event, round=round_, w=hashlib.sha256(flat(w).tobytes()).hexdigest())
        if note is not None:
            note(event, round_)
        event = "published"

    grid = InProcessGrid(client_app(learner_for), USERS)
    ppsgd.start(grid, ArrayRecord([np.zeros(LARGE)]), num_rounds=rounds, evaluate_fn=look)


def show(directory: Path) -> None:
    """What the next server finds."""
    ppsgd = strategy(checkpoint_dir=directory / "server")
    say("found", ledger=ppsgd.ledger.rounds, rounds_done=ppsgd.rounds_done)


def in_child(work: Callable[[], None]) -> int:
    """The id of a child that does this, or says what it died of."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except (OSError, ValueError, RuntimeError) as error:
        say("error", text=str(error))
    finally:
        os._exit(status)


def wait_for(child: int) -> None:
    os.waitpid(child, 0)


def kills(directory: Path) -> None:
    """Train for ever and die by SIGKILL, again and again.

    Half of the servers live until they have published something.
    """
    dice = random.Random(1)
    heard, beat = os.pipe()
    for place in range(KILLS):
        while select.select([heard], [], [], 0)[0]:
            os.read(heard, 1 << 16)
        child = in_child(lambda: train(directory, FOR_EVER, _beats(beat)))
        if place % 2:
            select.select([heard], [], [], PATIENCE)
        time.sleep(dice.random() ** 2 * 0.3)
        os.kill(child, signal.SIGKILL)
        wait_for(child)
        say("killed")
        wait_for(in_child(lambda: show(directory)))


def _beats(pipe: int) -> Note:
    def note(event: str, _: int) -> None:
        if event == "published":
            os.write(pipe, b".")

    return note


def limits(directory: Path) -> None:
    """Train where no file may grow beyond a limit, and then without one."""
    for limit in LIMITS:
        place = directory / str(limit)
        say("limit", bytes=limit)
        wait_for(in_child(functools.partial(_limited, place, limit)))
        say("room")
        wait_for(in_child(functools.partial(show, place)))
        wait_for(in_child(functools.partial(train, place, 6)))
        wait_for(in_child(functools.partial(show, place)))


def _limited(place: Path, limit: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    train(place, 4)


def hold(directory: Path) -> None:
    """Train one round and stay in it until somebody writes a line."""

    def stay(event: str, _: int) -> None:
        if event == "published":
            sys.stdin.readline()

    train(directory, 1, stay)


if __name__ == "__main__":
    {"kills": kills, "limits": limits, "hold": hold}[sys.argv[1]](Path(sys.argv[2]))
