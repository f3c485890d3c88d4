"""What a run shows, in about a dozen lines: the data, the promise, the result, what to do next.

Each condition of privacy.json begins with its short form, up to a colon. All of them are shown.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flwr_ppsgd.client.visit import LOCAL, SHARED
from flwr_ppsgd.data.look import hints
from flwr_ppsgd.experiments.outputs import SavedRun, read_people
from flwr_ppsgd.experiments.people import SAME
from flwr_ppsgd.experiments.problem import LINEAR, SYNTHETIC
from flwr_ppsgd.experiments.settings import Experiment
from flwr_ppsgd.promise import WEAK, rounded_up
from flwr_ppsgd.simulation.measures import badness, measure_of

Line: TypeAlias = tuple[str, str]  # a label, and what there is to say
WIDTH_OF_BAR = 20
PICTURES = ("users.png", "learning.png")


def data_lines(experiment: Experiment) -> list[Line]:
    """Before training: users, rows, features and task, and what to look at twice."""
    problem = experiment.problem
    if problem.data == SYNTHETIC:
        users = experiment.training.population
        return [("data", f"synthetic · {users:,} users · {problem.features:,} features")]
    data = problem.per_user()
    counts = (
        f"{len(data):,} users · {data.train_sizes.sum():,} training + {data.test_sizes.sum():,} "
        f"test rows · {data.features:,} features · {data.task}"
    )
    left_out = [note for note in data.notes if note.startswith("left out")]
    lines = [("data", f"{Path(problem.data).name} · {counts}")]
    return lines + [("", text) for text in (*left_out, *hints(data))]


def outcome_lines(experiment: Experiment, out: Path, saved: SavedRun) -> list[Line]:
    """After training: the promise, the rounds, the result and what to do next."""
    lines = [*_promise_lines(saved.privacy), _training_line(experiment, saved.privacy)]
    measures = saved.last_measures()
    if measures:
        answer = _without_features(experiment, measures)
        lines.append(_result_line(measures, answer, read_people(out)))
        lines += [("", text) for text in _advice(measures, answer)]
    return lines


def next_lines(experiment: Experiment, out: Path) -> list[Line]:
    """What to type next, and the picture."""
    command = f"ppsgd report {shlex.quote(str(out))}"
    problem = experiment.problem
    if problem.data != SYNTHETIC and problem.model == LINEAR and problem.per_user().feature_names:
        command = f"ppsgd predict {shlex.quote(str(out))} --data new.csv"
    pictures = [out / name for name in PICTURES if (out / name).exists()]
    return [("next", command), *(("", f"picture: {path}") for path in pictures[:1])]


def _short(conditions: Iterable[str]) -> str:
    return " · ".join(text.partition(":")[0] for text in conditions)


def _promise_lines(privacy: Mapping[str, Any]) -> list[Line]:
    lines = [("privacy", _headline(privacy))]
    if privacy["assumed_public"]:
        lines.append(("", f"provided that these are public: {_short(privacy['assumed_public'])}"))
    if privacy["caveats"]:
        lines.append(("", _short(privacy["caveats"])))
    return [*lines, ("outside", _short(privacy["outside_the_guarantee"]))]


def _headline(privacy: Mapping[str, Any]) -> str:
    """ε, δ and whom they protect; if nothing is promised, the statement's first line says why."""
    if privacy["guarantee"] == "none":
        return str(privacy["statement"].splitlines()[0])
    if not privacy["rounds_stated"]:
        return "ε = 0: nothing was published about anybody"
    epsilon = rounded_up(privacy["epsilon"])
    exchanged = rounded_up(privacy["epsilon_replace_one"])
    weak = " (weak)" if privacy["epsilon"] > WEAK else ""
    return (
        f"ε = {epsilon}{weak} ({exchanged} if data are exchanged), δ = {privacy['delta']:g} · "
        f"{privacy['guarantee']}"
    )


def _training_line(experiment: Experiment, privacy: Mapping[str, Any]) -> Line:
    done = privacy["rounds_trained"]
    planned = experiment.training.rounds
    text = f"{'━' * (WIDTH_OF_BAR * done // planned)}  {done}/{planned} rounds"
    if privacy["rounds_stated"] > privacy["rounds_charged"]:
        text += f", stopped: ε is that of the planned {privacy['rounds_stated']}"
    return "training", text


def _without_features(experiment: Experiment, measures: Mapping[str, float]) -> float | None:
    """The best of the answers that use no features; None if there is none."""
    main = measure_of(measures)
    answers = [answer[main] for answer in experiment.task.trivial().values() if main in answer]
    return min(answers, key=lambda value: badness(main, value), default=None)


def _result_line(
    measures: Mapping[str, float], answer: float | None, people: Mapping[str, list[Any]] | None
) -> Line:
    main = measure_of(measures)
    named = {
        "personal": measures[main],
        "shared": measures.get(SHARED + main),
        "alone": measures.get(LOCAL + main),
        "without features": answer,
    }
    parts = [f"{name} {value:.4g}" for name, value in named.items() if value is not None]
    gains = [gain for gain in (people or {}).get("gain", []) if gain is not None]
    if gains:
        better = sum(gain > SAME for gain in gains)
        parts.append(f"{better:,} of {len(gains):,} users gain")
    return main.replace("_", " "), "   ".join([*parts, "(not private)"])


def _advice(measures: Mapping[str, float], answer: float | None) -> list[str]:
    """One line if something simpler is as good as the personal models."""
    main = measure_of(measures)
    reached = badness(main, measures[main])
    others = {
        "this does not beat an answer without features: look at scales, ids and gaps with "
        "ppsgd look, or allow a larger ε": answer,
        "the shared model is as good as the personal ones: users are alike, or have too few "
        "rows each": measures.get(SHARED + main),
        "models from own rows alone are as good: allow a larger ε, or enrol more users": (
            measures.get(LOCAL + main)
        ),
    }
    for text, value in others.items():
        if value is not None and reached >= badness(main, value) - SAME:
            return [text]
    return []
