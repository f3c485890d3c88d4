"""The αQ that Theorem B.4 advises, beside the best one of a sweep.

The problems are synthetic, and all their constants are known. Prints a table: for each problem and
noise, each αQ and its risk as a multiple of the risk of the best αQ; the step is chosen for each αQ
on a grid. Run as a script; letters of problems may be given.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flwr_ppsgd import Ledger, Poisson, Release, Steps
from flwr_ppsgd.lab.engine import Setting, train
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.population import FreshPopulation
from flwr_ppsgd.lab.synthetic import Synthetic
from flwr_ppsgd.lab.theory import EASED, Minimiser, squared_loss_smoothness, theorem_b_4

ALPHA_QS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, math.inf)
STEPS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5)
DELTA = 1e-4
DRAWN_SPREAD = 0.01  # of ``Synthetic.draw``
HEAD = (
    "problem",
    "z",
    "ε",
    "best αQ, average",
    "last",
    "advice: × average, last",
    "bound for L: × average, last",
)


@dataclass(frozen=True)
class Case:
    """A problem and how it is trained.

    Args:
        name: begins with a letter that is its own.
        users: N.
        features: d.
        rate: q.
        rounds: T.
        batch_size: m.
        clip_norm: C.
        label_noise: τ.
        spread: of the users' optima in each of five coordinates.
        noises: noise multipliers.
    """

    name: str
    users: int
    features: int
    rate: float
    rounds: int
    batch_size: int
    clip_norm: float
    label_noise: float
    spread: float
    noises: tuple[float, ...]

    def problem(self) -> Synthetic:
        """The paper's problem with another spread and label noise."""
        drawn = Synthetic.draw(self.users, self.features, 1)
        mean = drawn.optima.mean(axis=0)
        optima = mean + (drawn.optima - mean) * self.spread / DRAWN_SPREAD
        return replace(drawn, optima=optima, label_noise=self.label_noise)

    def release(self, z: float) -> Release:
        """What a round publishes at one noise multiplier."""
        return Release(Poisson(self.users, self.rate), self.clip_norm, z)

    def advised(self, z: float) -> tuple[float, float]:
        """The αQ of the smallest bound for L/EASED, and for L itself, with the true constants.

        σ² = τ²·tr Σ (Section 4), and L = 2R². Gaussian features have no largest norm: R² is three
        standard deviations above the mean of ‖x‖².
        """
        problem = self.problem()
        trace = problem.variances.sum()
        squared_radius = trace + 3 * math.sqrt(2 * (problem.variances**2).sum())
        mean = problem.optima.mean(axis=0)
        squares = float(((problem.optima - mean) ** 2).sum())
        variance = problem.label_noise**2 * trace / self.batch_size
        release = self.release(z)
        theorem = theorem_b_4(
            population=self.users,
            rate=self.rate,
            rounds=self.rounds,
            dimension=self.features,
            smoothness=squared_loss_smoothness(math.sqrt(squared_radius)),
            variance_w=variance,
            variance_theta=variance,
            noise_std=release.noise_std / release.denominator,
        )
        distance = float(np.linalg.norm(mean))
        spread = math.sqrt(squares / self.users)
        minimiser = Minimiser.additive_norms(self.users, distance, spread)
        advised = theorem.for_smoothness_over(EASED).best(minimiser).alpha * theorem.denominator
        strict = theorem.best(minimiser).alpha * theorem.denominator
        return advised, strict

    def risks(self, z: float, alpha_qs: set[float], average: bool) -> dict[float, float]:
        """Excess risk at the end for each αQ, with its best step."""
        release = self.release(z)
        grid = [(alpha_q, step) for alpha_q in sorted(alpha_qs) for step in STEPS]
        settings = [Setting(release, Steps.from_ratio(step, alpha_q)) for alpha_q, step in grid]
        population = FreshPopulation(self.problem(), self.batch_size)
        engine = LinearEngine(population, settings, seed=1, average=average)
        *_, last = train(engine, self.rounds, self.rounds, lambda _: None)
        found: dict[float, float] = {}
        for place, measures in last.measures.items():
            alpha_q, _ = grid[place]
            risk = measures.get("excess_risk", math.inf)
            if place not in last.diverged and math.isfinite(risk):
                found[alpha_q] = min(risk, found.get(alpha_q, math.inf))
        return found


CASES = (
    Case("A: the paper's, clipped", 1000, 100, 1.0, 300, 10, 10.0, 0.01, 0.01, (10.0, 100.0)),
    Case("B: noisy labels", 300, 20, 1.0, 200, 10, 300.0, 10.0, 0.01, (0.1, 1.0, 10.0)),
    Case("C: B, sampled", 500, 20, 0.1, 400, 5, 300.0, 10.0, 0.01, (0.1, 0.5, 2.0)),
    Case("D: users differ", 300, 20, 1.0, 200, 10, 300.0, 1.0, 3.0, (0.1, 1.0, 10.0)),
    Case("E: few rounds", 300, 20, 1.0, 30, 1, 300.0, 10.0, 0.01, (0.1, 1.0, 10.0)),
    Case("F: few visits", 1000, 20, 0.02, 500, 5, 300.0, 10.0, 0.01, (0.1, 0.5, 2.0)),
    Case("G: few visits, users differ", 1000, 20, 0.02, 500, 5, 300.0, 1.0, 3.0, (0.1, 0.5, 2.0)),
    # Not among those on which EASED was chosen:
    Case("H: many features", 200, 60, 1.0, 150, 5, 600.0, 3.0, 0.5, (0.3, 3.0, 30.0)),
    Case("I: sampled, users differ", 400, 40, 0.25, 200, 10, 500.0, 5.0, 1.0, (0.2, 1.0, 5.0)),
    Case("J: small population", 50, 10, 1.0, 400, 2, 200.0, 5.0, 0.1, (0.1, 1.0, 5.0)),
)


def compared(case: Case) -> Iterator[str]:
    """A line of the table for each noise."""
    for z in case.noises:
        choices = case.advised(z)
        epsilon = Ledger(DELTA).record(case.release(z), case.rounds).epsilon()
        alpha_qs = {*ALPHA_QS, *choices}
        average = case.risks(z, alpha_qs, average=True)
        last = case.risks(z, alpha_qs, average=False)
        cells = [case.name, f"{z:g}", f"{epsilon:.3g}"]
        cells += [f"{best_of(average):.3g}", f"{best_of(last):.3g}"]
        for alpha_q in choices:
            worse_average = times_the_best(average, alpha_q)
            worse_last = times_the_best(last, alpha_q)
            cells.append(f"{alpha_q:.3g}: ×{worse_average:.2f}, ×{worse_last:.2f}")
        yield table_row(cells)


def best_of(risks: Mapping[float, float]) -> float:
    """The αQ of the smallest risk."""
    return min(risks, key=lambda alpha_q: risks[alpha_q])


def times_the_best(risks: Mapping[float, float], alpha_q: float) -> float:
    """The risk of an αQ, as a multiple of the smallest."""
    return risks.get(alpha_q, math.inf) / min(risks.values())


def table_row(cells: list[str] | tuple[str, ...]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(table_row(HEAD))
    print("|" + "---|" * len(HEAD))
    for chosen in CASES:
        if len(sys.argv) < 2 or chosen.name[0] in sys.argv[1]:
            for line in compared(chosen):
                print(line, flush=True)
