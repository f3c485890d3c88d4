"""One ClientApp, three strategies: FedAvg, FedAvg under Flower's DP wrapper, and PPSGD. One picture.

What changes between the three is the strategy alone. The two private ones add noise of the same size to the mean of
what 100 users send. Excess risk is that of w + θ_i, and FedAvg leaves every θ_i at 0.
"""

import logging
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from numpy import zeros

from flwr_ppsgd import PPSGD, Ledger, client_app
from flwr_ppsgd.cli import console
from flwr_ppsgd.experiments.run import Experiment, learner_for
from flwr_ppsgd.results.plots import learning_curves
from flwr_ppsgd.simulation import InProcessGrid

ROUNDS = 60
PICTURE = Path("runs") / "swap.png"


def strategies(experiment: Experiment) -> dict[str, Strategy]:
    """The one line that changes."""
    z, clip_norm, users = experiment.release().noise_multiplier, experiment.clip_norm, experiment.population
    return {
        "FedAvg, not private": FedAvg(),
        "FedAvg in Flower's DP wrapper": DifferentialPrivacyServerSideFixedClipping(FedAvg(), z, clip_norm, users),
        "PPSGD": PPSGD.from_config(experiment.to_flat()),
    }


def curve(strategy: Strategy, experiment: Experiment) -> list[dict[str, float]]:
    """Excess risk after each round, as the clients report it."""
    app = client_app(learner_for, local_step=experiment.step)
    grid = InProcessGrid(app, experiment.population, experiment.to_flat())
    result = strategy.start(grid, ArrayRecord([zeros(experiment.features)]), num_rounds=ROUNDS)
    return [
        {"round": round_, "epsilon": 0.0, "excess_risk": _number(metrics["excess_risk"])}
        for round_, metrics in result.evaluate_metrics_clientapp.items()
        if round_ > 0
    ]


def _number(value: Any) -> float:
    return float(value)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    experiment = Experiment.load(overrides={"rounds": ROUNDS, "evaluate-every": 1})
    curves, ppsgd = {}, None
    for label, strategy in strategies(experiment).items():
        curves[label] = curve(strategy, experiment)
        console.print(f"{label:32s} excess risk {curves[label][-1]['excess_risk']:8.3g}", highlight=False)
        ppsgd = strategy if isinstance(strategy, PPSGD) else ppsgd
    assert ppsgd is not None
    for row in curves["PPSGD"]:
        row["epsilon"] = Ledger(experiment.delta).record(ppsgd.release, int(row["round"])).epsilon()
    PICTURE.parent.mkdir(exist_ok=True)
    footnote = "ε is PPSGD's, for one run alone. Measured on the users' own data: outside the guarantee."
    learning_curves(curves, "excess_risk", PICTURE, "The same clients under three strategies", footnote)
    console.print(ppsgd.privacy_statement().splitlines()[0], highlight=False)
    console.print(f"Picture: {PICTURE}")


if __name__ == "__main__":
    main()
