"""``python -m simulations.apps.adapters``: where differential privacy works for networks.

512 factors on the features of a frozen, public backbone learn what users have in common, at an ε at
which training the backbone itself does not.
"""

from flwr.app import UserConfig

from simulations.apps.adapters import client_app
from simulations.apps.adapters.task import adapted, whole
from simulations.apps.side_by_side import Run, arguments, show

STEP = 40.0  # of the adapter
STEP_OF_ALL = 2.0  # of the adapter and the backbone together


def main(given: list[str] | None = None) -> dict[str, float]:
    parser = arguments("simulations.apps.adapters", rounds=16, population=120)
    options = parser.parse_args(given)
    config: UserConfig = {
        "epsilon": options.epsilon,
        "rounds": options.rounds,
        "population": options.users,
    }
    runs = {
        "head alone": Run(client_app.app, adapted, {**config, "step": 0.0}),
        "shared adapter": Run(client_app.app, adapted, {**config, "step": STEP}),
        "shared adapter and backbone": Run(
            client_app.app_sharing_all, whole, {**config, "step": STEP_OF_ALL}
        ),
    }
    return show(runs, options.picture, "Glyphs in users' own pictures")


if __name__ == "__main__":
    main()
