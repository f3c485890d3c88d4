"""Local, personalized and global learning at the same noise: one picture, one epsilon. Takes well under a minute."""

import logging
import math
from pathlib import Path

from flwr_ppsgd.cli import console, progress_bar, progress_hook
from flwr_ppsgd.plots import learning_curves
from flwr_ppsgd.simulation.experiment import Experiment, Outcome, run

WAYS = {"local (α = 0)": 0.0, "personalized (αQ = 0.3)": 0.3, "global (α = ∞)": math.inf}
PICTURE = Path("runs") / "demo.png"


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    outcomes: dict[str, Outcome] = {}
    with progress_bar() as progress:
        for label, alpha_q in WAYS.items():
            experiment = Experiment.load(overrides={"alpha-q": alpha_q})
            outcomes[label] = run(experiment, progress_hook(progress, label, experiment.rounds))
    show(outcomes)


def show(outcomes: dict[str, Outcome]) -> None:
    """The picture, and what was guaranteed to whom."""
    personalized = list(outcomes.values())[1]
    epsilon, population = personalized.strategy.ledger.epsilon(), personalized.experiment.population
    PICTURE.parent.mkdir(exist_ok=True)
    learning_curves(
        {label: outcome.rows for label, outcome in outcomes.items()},
        "excess_risk",
        PICTURE,
        title=f"{population} users, noise multiplier {personalized.experiment.noise_multiplier:g}: who learns best?",
        footnote="Three curves are three releases; ε is that of one alone. Local learning releases nothing (ε = 0).",
    )
    for label, outcome in outcomes.items():
        console.print(f"{label:26s} excess risk {outcome.rows[-1]['excess_risk']:8.3g}", highlight=False)
    console.print(personalized.strategy.privacy_statement(), highlight=False, markup=False)
    console.print("Three curves are three releases: the statement is about the personalized one alone.")
    console.print(f"Picture: {PICTURE}   epsilon = {epsilon:.3g}", highlight=False)


if __name__ == "__main__":
    main()
