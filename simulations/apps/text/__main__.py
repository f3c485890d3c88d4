"""``python -m simulations.apps.text``: shared word weights help everybody to learn tags.

Without ``--data`` the text is synthetic. With ``--data zephyr_tags.npz`` it is the commit messages
of 191 authors.
"""

from pathlib import Path

from flwr.app import UserConfig

from simulations.apps.side_by_side import Run, arguments, show
from simulations.apps.text import client_app
from simulations.apps.text.task import USERS, TagNet, texts

STEP = 20.0  # of the word weights


def main(given: list[str] | None = None) -> dict[str, float]:
    parser = arguments("simulations.apps.text", rounds=16, population=USERS)
    parser.add_argument("--data", type=Path, help="a file in the form of zephyr_tags.npz")
    options = parser.parse_args(given)
    path = str(options.data.resolve()) if options.data else ""
    config: UserConfig = {
        "data": path,
        "epsilon": options.epsilon,
        "rounds": options.rounds,
        "population": min(options.users, texts(path).users),
    }
    runs = {}
    for label, step in (("head alone", 0.0), ("shared word weights", STEP)):
        runs[label] = Run(client_app.app, TagNet, {**config, "step": step})
    return show(runs, options.picture, "Tags of users' own texts")


if __name__ == "__main__":
    main()
