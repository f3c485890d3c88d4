"""One ClientApp, three strategies: FedAvg, FedAvg under Flower's DP wrapper, and PPSGD. One
picture.

What changes between the three is the strategy alone. The two private ones add noise of the same
size to the mean of what 100 users send. Excess risk is that of w + θ_i, and FedAvg leaves every θ_i
at 0.
"""

import logging
from pathlib import Path

from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy

from flwr_ppsgd import PPSGD, client_app
from flwr_ppsgd.cli import console
from flwr_ppsgd.experiments.rows import RunRow
from flwr_ppsgd.experiments.settings import Experiment
from flwr_ppsgd.experiments.tasks import learner_for
from flwr_ppsgd.results.figures import learning_curves
from flwr_ppsgd.simulation import InProcessGrid
from simulations.examples import rows_of, with_epsilon

ROUNDS = 60
MEASURE = "excess_risk"
PICTURE = Path("runs") / "swap.png"
FOOTNOTE = (
    "ε is PPSGD's, for one run alone. Measured on the users' own data: outside the guarantee."
)


def strategies(experiment: Experiment) -> dict[str, Strategy]:
    """The one line that changes."""
    release = experiment.training.release()
    wrapped = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(),
        noise_multiplier=release.noise_multiplier,
        clipping_norm=release.clip_norm,
        num_sampled_clients=experiment.training.population,
    )
    return {
        "FedAvg, not private": FedAvg(),
        "FedAvg in Flower's DP wrapper": wrapped,
        "PPSGD": PPSGD.from_config(experiment.training.to_flat()),
    }


def curve(strategy: Strategy, experiment: Experiment) -> list[RunRow]:
    """Excess risk after each round, as the clients report it; without ε."""
    app = client_app(learner_for, local_step=experiment.training.step)
    grid = InProcessGrid(app, experiment.training.population, experiment.to_flat())
    result = strategy.start(grid, experiment.task.initial_arrays(), num_rounds=ROUNDS)
    return rows_of(result, MEASURE)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    experiment = Experiment.load(overrides={"rounds": ROUNDS, "evaluate-every": 1})
    curves = {}
    statement = ""
    for label, strategy in strategies(experiment).items():
        rows = curve(strategy, experiment)
        console.print(f"{label:32s} excess risk {rows[-1].measures[MEASURE]:8.3g}", highlight=False)
        if isinstance(strategy, PPSGD):
            rows = with_epsilon(rows, strategy)
            statement, *_ = strategy.privacy_statement().splitlines()
        curves[label] = rows
    PICTURE.parent.mkdir(exist_ok=True)
    title = "The same clients under three strategies"
    learning_curves(curves, MEASURE, PICTURE, title, FOOTNOTE)
    console.print(statement, highlight=False)
    console.print(f"Picture: {PICTURE}")


if __name__ == "__main__":
    main()
