"""What people wait for, from the command to the result: CPU seconds of all threads."""

import functools
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd import (
    PPSGD,
    Ledger,
    Poisson,
    Release,
    SecureSum,
    Steps,
    affordable_rounds,
    calibrate_noise,
    client_app,
)
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.additive_linear import AdditiveLinear
from flwr_ppsgd.simulation import InProcessGrid
from simulations.benchmarks.measuring import seconds, show
from simulations.benchmarks.workload import (
    BATCH,
    CLASSES,
    CLIP_NORM,
    DELTA,
    FEATURES,
    USERS,
    constant_learner,
)
from simulations.benchmarks.yardsticks import random_table

ROOT = Path(__file__).parents[2]
WRITERS = ROOT.parent / "shared" / "data" / "mnist_writer.npz"
IMPORTS = "import flwr_ppsgd.lab.run, flwr_ppsgd.lab.screen, pandas, matplotlib.figure"
PROMISE = ("--set", "epsilon=1", "--set", "delta=1e-5")


def show_waiting() -> None:
    """End to end, and the parts that used to be slow."""
    show("README's lines, in s", command_seconds("-c", readme_lines()), at_most=6)
    show("make demo, after the install, in s", command_seconds("simulations/demo.py"), at_most=20)
    show("ppsgd audit, in s", cli_seconds("audit"), at_most=20)
    show("ppsgd run, 140 users × 100 rows, beyond imports, in s", table_seconds(), at_most=4)
    if WRITERS.exists():
        run = cli_seconds("run", "--data", str(WRITERS), *PROMISE)
        show("ppsgd run, 580 writers with random convolutions, in s", run, at_most=35)
    show("PPSGD.auto, 580 users × 112 rows, in s", recipe_seconds(), at_most=8)
    show("a secure round, 300 users × 10^5 numbers, in s", secure_seconds(), at_most=60)
    calibrating, counting = rare_rounds_seconds()
    show("calibrate_noise at q = 1e-3, T = 20,000, in s", calibrating, at_most=3)
    show("affordable_rounds, the same, in s", counting, at_most=3)
    show("epsilon of a ledger of 50 kinds of release, in s", mixed_seconds(), at_most=3)


def command_seconds(*arguments: str) -> float:
    """Of a Python process in an empty directory, and of what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        first, *rest = arguments
        script = str(ROOT / first) if first.endswith(".py") else first
        command = [sys.executable, script, *rest]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cli_seconds(*arguments: str) -> float:
    return command_seconds("-m", "flwr_ppsgd.cli", *arguments)


def readme_lines() -> str:
    """The first example of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def table_seconds() -> float:
    """A table as schools have them, as a .csv file."""
    source = np.random.default_rng(0)
    lines = ["user,a,b,c,d,e,y"]
    for user in range(140):
        x = source.normal(size=(100, 5))
        y = x @ source.normal(1, 1, size=5) + source.normal(size=100)
        rows = np.column_stack([x, y]).round(4).tolist()
        lines += [",".join([f"s{user}", *map(str, row)]) for row in rows]
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("\n".join(lines))
        file.flush()
        whole = cli_seconds("run", "--data", file.name, *PROMISE)
    return whole - command_seconds("-c", IMPORTS)


def recipe_seconds(users: int = 580, rows: int = 112) -> float:
    """A whole training by ``auto`` through messages, with its delivery."""
    table = random_table(USERS, rows, FEATURES, CLASSES)

    @functools.cache
    def learner_of(user: int) -> AdditiveLinear:
        own = slice(user * rows, (user + 1) * rows)
        x = table.x[own].astype(np.float64)
        batches = Minibatches(x, table.y[own], BATCH, seed=1, user=user)
        return AdditiveLinear(batches, FEATURES, CLASSES)

    def learner_for(context: Context) -> AdditiveLinear:
        return learner_of(int(context.node_config["partition-id"]))

    server = PPSGD.auto(population=users, epsilon=1.0, delta=DELTA)
    grid = InProcessGrid(client_app(learner_for), users)
    return seconds(lambda: server.start(grid, ArrayRecord([np.zeros((FEATURES, CLASSES))])))


def secure_seconds(users: int = 300, size: int = 10**5) -> float:
    """All clients and the server, in this process."""
    rules = SecureSum(honest=250, colluding=10)
    release = Release(Poisson(users, 1.0), CLIP_NORM, 1.0, aggregation=rules)
    server = PPSGD(release=release, steps=Steps(0.1, 0.1), delta=DELTA)
    grid = InProcessGrid(client_app(constant_learner), users)
    start = ArrayRecord([np.zeros(size)])
    return seconds(lambda: server.start(grid, start, num_rounds=1))


def rare_rounds_seconds() -> tuple[float, float]:
    """For calibrating 20,000 rounds in which one of a thousand takes part, and for counting how
    many such rounds can be paid for."""
    cohort = Poisson(10**6, rate=1e-3)

    def calibrate() -> float:
        return calibrate_noise(epsilon=1.0, delta=1e-6, cohort=cohort, rounds=20_000)

    def count() -> int:
        release = Release(cohort, CLIP_NORM, noise_multiplier=0.88)
        return affordable_rounds(max_epsilon=1.0, delta=1e-6, release=release)

    return seconds(calibrate), seconds(count)


def mixed_seconds() -> float:
    """For ε of fifty noise multipliers, twenty rounds each."""
    ledger = Ledger(1e-5)
    for kind in range(50):
        noise = 1 + 0.02 * kind
        ledger = ledger.record(Release(Poisson(USERS, 0.01), CLIP_NORM, noise), 20)
    return seconds(ledger.epsilon)
