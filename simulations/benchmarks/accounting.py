"""What people wait for before a training, and in the middle of one."""

import itertools

from flwr_ppsgd import Ledger, Poisson, Release, affordable_rounds, calibrate_noise
from simulations.benchmarks.measuring import in_a_process, median_seconds, seconds, show
from simulations.benchmarks.workload import CLIP_NORM, USERS, ledgers

PLAN = """
try:
    flwr_ppsgd.cli.main()
except SystemExit:
    pass
print(time.process_time() - start)
"""


def show_accounting() -> None:
    """CPU seconds for what people wait for before a training, and in the middle of one."""
    calibrating, counting = rare_rounds_seconds()
    show("k. calibrate_noise at q = 1e-3, T = 20,000, in s", calibrating, at_most=3)
    show("k. affordable_rounds, the same, in s", counting, at_most=3)
    show("k. epsilon of a ledger of 50 kinds of release, in s", mixed_seconds(), at_most=3)
    show(
        "k. ppsgd plan for the same 20,000 rounds, beyond imports, in s",
        planning_seconds(),
        at_most=3,
    )
    name = "c. quick_epsilon in ms per round,"
    show(f"{name} cohorts by coin", epsilon_ms(rate=0.01), at_most=1)
    show(f"{name} everyone in every round", epsilon_ms(rate=1.0), at_most=1)


def rare_rounds_seconds() -> tuple[float, float]:
    """For calibrating 20,000 rounds in which one of a thousand takes part, and for counting how
    many such rounds can be paid for."""
    cohort = Poisson(10**6, rate=1e-3)

    def calibrated() -> float:
        return calibrate_noise(epsilon=1.0, delta=1e-6, cohort=cohort, rounds=20_000)

    def counted() -> int:
        release = Release(cohort, CLIP_NORM, noise_multiplier=0.88)
        return affordable_rounds(max_epsilon=1.0, delta=1e-6, release=release)

    return seconds(calibrated), seconds(counted)


def mixed_seconds() -> float:
    """For ε of fifty noise multipliers, twenty rounds each."""
    ledger = Ledger(1e-5)
    for kind in range(50):
        noise = 1 + 0.02 * kind
        ledger = ledger.record(Release(Poisson(USERS, 0.01), CLIP_NORM, noise), 20)
    return seconds(ledger.epsilon)


def epsilon_ms(rate: float, rounds: int = 100, repetitions: int = 5) -> float:
    """Milliseconds for ε after one round, asked for after every round as the strategy does.

    What only the first one pays is left out, and no ledger is asked twice, since an answer may be
    kept.
    """
    release = Release(Poisson(USERS, rate), CLIP_NORM, noise_multiplier=1.0)
    growing = ledgers(release)
    next(growing).quick_epsilon()

    def ask() -> None:
        for ledger in itertools.islice(growing, rounds):
            ledger.quick_epsilon()

    return 1000 * median_seconds(ask, repetitions) / rounds


def planning_seconds() -> float:
    """What ``ppsgd plan`` computes and prints for 20,000 rounds, beyond imports."""
    arguments = "--population 1000000 --rate 1e-3 --rounds 20000 --epsilon 1 --delta 1e-7"
    code = f"import time, flwr_ppsgd.cli, flwr_ppsgd.plan\nstart = time.process_time()\n{PLAN}"
    done = in_a_process(code, "plan", *arguments.split())
    return float(done.stdout.splitlines()[-1])
