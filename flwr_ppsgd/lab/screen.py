"""What a run shows, in about a dozen lines: the data, the promise, the result, what to do next.

Each condition of privacy.json begins with its short form, up to a colon. All of them are shown.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flwr_ppsgd.lab.data.look import hints
from flwr_ppsgd.lab.evaluation import SAME
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.measures import badness, measure_of
from flwr_ppsgd.lab.outputs import SavedRun, read_people
from flwr_ppsgd.lab.problem import LINEAR, SYNTHETIC
from flwr_ppsgd.lab.rows import INFINITE
from flwr_ppsgd.learner import LOCAL, SHARED
from flwr_ppsgd.statement import WEAK, rounded_up

Line: TypeAlias = tuple[str, str]  # a label, and what there is to say
PICTURES = ("users.png", "learning.png")
ADVICE = {  # if something simpler is as good as the personal models
    "without features": "this does not beat an answer without features: look at scales, ids and "
    "gaps with ppsgd look, or allow a larger ε",
    "shared": "the shared model is as good as the personal ones: users are alike, or have few rows",
    "alone": "models from own rows alone are as good: allow a larger ε, or enrol more users",
}


def data_lines(experiment: Experiment) -> list[Line]:
    """Before training: users, rows, features and task, and what to look at twice."""
    problem = experiment.problem
    if problem.data == SYNTHETIC:
        users = experiment.training.population
        return [("data", f"synthetic · {users:,} users · {problem.features:,} features")]
    data = problem.per_user()
    rows = f"{data.train_sizes.sum():,} training + {data.test_sizes.sum():,} test rows"
    about = f"{len(data):,} users · {rows} · {data.features:,} features · {data.task}"
    left_out = [note for note in data.notes if note.startswith("left out")]
    more = [("", text) for text in (*left_out, *hints(data))]
    return [("data", f"{Path(problem.data).name} · {about}"), *more]


def outcome_lines(experiment: Experiment, out: Path, saved: SavedRun) -> list[Line]:
    """After training: the promise, the rounds and the result."""
    privacy = saved.privacy
    lines = [("privacy", _headline(privacy))]
    if privacy["assumed_public"]:
        lines.append(("", f"provided that these are public: {_short(privacy['assumed_public'])}"))
    if privacy["caveats"]:
        lines.append(("", _short(privacy["caveats"])))
    lines.append(("outside", _short(privacy["outside_the_guarantee"])))
    done = saved.rounds_trained
    planned = experiment.training.rounds
    rounds = f"{'━' * (20 * done // planned)}  {done}/{planned} rounds"
    if privacy["rounds_stated"] > privacy["rounds_charged"]:
        rounds += f", stopped: ε is that of the planned {privacy['rounds_stated']}"
    lines.append(("training", rounds))
    return lines + _result_lines(experiment, saved.last_measures(), read_people(out) or {})


def next_lines(experiment: Experiment, out: Path) -> list[Line]:
    """What to type next, and the picture."""
    directory = shlex.quote(str(out))
    command = f"ppsgd report {directory}"
    problem = experiment.problem
    if problem.data != SYNTHETIC and problem.model == LINEAR and problem.per_user().feature_names:
        command = f"ppsgd predict {directory} --data new.csv"
    pictures = [out / name for name in PICTURES if (out / name).exists()]
    return [("next", command), *(("", f"picture: {path}") for path in pictures[:1])]


def _short(conditions: Iterable[str]) -> str:
    return " · ".join(text.partition(":")[0] for text in conditions)


def _headline(privacy: Mapping[str, Any]) -> str:
    """Both ε, δ and whom they protect; if nothing is promised, the statement's line on why."""
    if privacy["guarantee"] == "none":
        return str(privacy["statement"].splitlines()[0])
    if not privacy["rounds_stated"]:
        return "ε = 0: nothing was published about anybody"
    weak = " (weak)" if privacy["epsilon"] > WEAK else ""
    exchanged = f"{_epsilon(privacy['epsilon_replace_one'])} if data are exchanged"
    epsilon = f"ε = {_epsilon(privacy['epsilon'])}{weak} ({exchanged})"
    return f"{epsilon}, δ = {privacy['delta']:g} · {privacy['guarantee']}"


def _epsilon(value: float | str) -> str:
    """A number of privacy.json, which has a word for infinity."""
    return "∞" if value == INFINITE else rounded_up(float(value))


def _result_lines(
    experiment: Experiment, measures: Mapping[str, float], people: Mapping[str, list[Any]]
) -> list[Line]:
    """The main measure of all models, how many users gain, and a line of advice if one is due."""
    if not measures:
        return []
    main = measure_of(measures)
    values = {"personal": measures[main]}
    for name, key in (("shared", SHARED + main), ("alone", LOCAL + main)):
        if key in measures:
            values[name] = measures[key]
    answers = [answer[main] for answer in experiment.trivial().values() if main in answer]
    if answers:
        values["without features"] = min(answers, key=lambda value: badness(main, value))
    parts = [f"{name} {value:.4g}" for name, value in values.items()]
    gains = [gain for gain in people.get("gain", []) if gain is not None]
    if gains:
        better = sum(gain > SAME for gain in gains)
        parts.append(f"{better:,} of {len(gains):,} users gain")
    lines = [(main.replace("_", " "), "   ".join([*parts, "(not private)"]))]
    reached = badness(main, values["personal"]) + SAME
    as_good = [name for name in ADVICE if name in values and reached >= badness(main, values[name])]
    return lines + [("", ADVICE[name]) for name in as_good[:1]]
