"""What a run prints, in about a dozen lines: the data, the promise, the result, what to do next.

Each condition of privacy.json begins with a short form that ends at a colon; all of these are
shown.
"""

import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flwr_ppsgd.cli import console, show
from flwr_ppsgd.lab.evaluation import SAME_MEASURE
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.features import count_of
from flwr_ppsgd.lab.inspect import hints
from flwr_ppsgd.lab.measures import badness, measure_of, name_of_measure
from flwr_ppsgd.lab.outputs import PICTURE, USERS_PICTURE, SavedRun
from flwr_ppsgd.lab.problem import LINEAR, SYNTHETIC
from flwr_ppsgd.lab.rows import INFINITE
from flwr_ppsgd.lab.run import OnRound
from flwr_ppsgd.lab.workers import OnProgress
from flwr_ppsgd.learner import LOCAL, SHARED
from flwr_ppsgd.statement import WEAK, rounded_up, up_to_colons

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Result

    from flwr_ppsgd.ledger import Ledger

LabelledLine: TypeAlias = tuple[str, str]  # a label and a text

LABEL_WIDTH = 11
BAR_WIDTH = 20
MOST_HINTS = 4  # about the data; the rest is shown by ppsgd look
NO_GUARANTEE = "NO GUARANTEE"
DECISIONS = ("left out", "taken as categories")  # beginnings of notes that options change
ADVICE = {  # by the simpler answer that is as good as the personal models
    "without features": "this does not beat an answer without features: look at scales, ids and "
    "gaps with ppsgd look, or allow a larger ε",
    "shared": "the shared model is as good as the personal ones, or better: users are alike, or "
    "have few rows; more rows per user help, or use w of model.npz for everyone",
    "alone": "models from own rows alone are as good, or better: allow a larger ε, or enrol more "
    "users",
}


def show_lines(lines: Iterable[LabelledLine], *, unbroken: bool = False) -> None:
    """Print labels and texts in two columns, broken between words on a terminal.

    Args:
        lines: a label and a text each.
        unbroken: never break lines, since they are to be copied.
    """
    width = sys.maxsize if unbroken or not console.is_terminal else console.width
    for label, text in lines:
        first = f"{label:{LABEL_WIDTH}} "
        indent = " " * len(first)
        show(
            textwrap.fill(
                text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False
            )
        )


def data_lines(experiment: Experiment) -> list[LabelledLine]:
    """Before training: users, rows, features, task, and warnings."""
    problem = experiment.problem
    if problem.data == SYNTHETIC:
        population = experiment.training.population
        return [("data", f"synthetic · {population:,} users · {problem.features:,} features")]
    data = problem.per_user()
    users = count_of(len(data), "user")
    task = f"{count_of(data.features, 'feature')} · {data.task_words()}"
    if problem.schema:  # print nothing that depends on a user's rows
        schema = Path(problem.schema).name
        return [("data", f"{Path(problem.data).name} · {users} · {task} · as in {schema}")]
    rows = f"{data.train_sizes.sum():,} training + {data.test_sizes.sum():,} test rows"
    decided = [note for note in data.notes if note.startswith(DECISIONS)]
    found = [*decided, *hints(data)]
    more = found[:MOST_HINTS]
    if len(found) > MOST_HINTS:
        more.append(f"{len(found) - MOST_HINTS} more: ppsgd look {shlex.quote(problem.data)}")
    first = f"{Path(problem.data).name} · {users} · {rows} · {task}"
    return [("data", first), *(("", text) for text in more)]


def outcome_lines(experiment: Experiment, saved: SavedRun) -> list[LabelledLine]:
    """After training: the promise, the rounds and the result."""
    privacy = saved.privacy
    lines = [("privacy", _promise_text(privacy))]
    for key in ("conditional_on", "caveats"):
        if privacy.get(key):
            lines.append(("", up_to_colons(privacy[key])))
    lines.append(("outside", up_to_colons(privacy["outside_the_guarantee"])))
    lines.append(("training", _rounds_text(experiment.training.rounds, saved)))
    measures = saved.last_measures()
    if not measures:
        return lines
    main = measure_of(measures)
    values = values_by_model(measures)
    answers = [answer[main] for answer in experiment.trivial().values() if main in answer]
    if answers:
        values["without features"] = min(answers, key=lambda value: badness(main, value))
    parts = [f"{name} {value:.4g}" for name, value in values.items()]
    parts += [*gain_texts(saved), "(not private)"]
    lines.append((name_of_measure(main), "   ".join(parts)))
    advice = advice_on(main, values)
    return [*lines, ("", advice)] if advice else lines


def next_lines(experiment: Experiment, out: Path) -> list[LabelledLine]:
    """The next command to type, and the picture."""
    directory = shlex.quote(str(out))
    command = f"ppsgd report {directory}"
    problem = experiment.problem
    if problem.data != SYNTHETIC and problem.model == LINEAR and problem.per_user().feature_names:
        command = f"ppsgd predict {directory} --data new.csv"
    names = (USERS_PICTURE, PICTURE)
    pictures = [f"picture: {out / name}" for name in names if (out / name).exists()]
    return [("next", "   ·   ".join([command, *pictures[:1]]))]


def _promise_text(privacy: Mapping[str, Any]) -> str:
    """ε, ε of replace-one, δ and the guarantee; without one, the statement's first line."""
    if privacy["guarantee"] == "none":
        return str(privacy["statement"].splitlines()[0])
    if not privacy["rounds_stated"]:
        return "ε = 0: nothing was published about anybody"
    weak = " (weak)" if privacy["epsilon"] > WEAK else ""
    exchanged = f"{_epsilon_text(privacy['epsilon_replace_one'])} if data are exchanged"
    epsilon = f"ε = {_epsilon_text(privacy['epsilon'])}{weak} ({exchanged})"
    return f"{epsilon}, δ = {privacy['delta']:g} · {privacy['guarantee']}"


def _epsilon_text(value: float | str) -> str:
    """A number of privacy.json, which has a word for infinity."""
    return "∞" if value == INFINITE else rounded_up(float(value))


def _rounds_text(planned: int, saved: SavedRun) -> str:
    privacy = saved.privacy
    done = saved.rounds_trained
    spent = NO_GUARANTEE
    if privacy["guarantee"] != "none":
        spent = f"ε = {_epsilon_text(privacy['epsilon'])}"
    text = f"{'━' * (BAR_WIDTH * done // planned)}  {done}/{planned} rounds   {spent}"
    if privacy["rounds_stated"] > privacy["rounds_charged"]:
        text += f", stopped: that is for the planned {privacy['rounds_stated']}"
    return text


def advice_on(main: str, values: Mapping[str, float]) -> str:
    """The advice if the best simpler answer is as good as the personal models; else empty.

    Args:
        main: the measure.
        values: of the personal models and of the keys of ``ADVICE`` that were measured.
    """
    simpler = [name for name in ADVICE if name in values]
    if not simpler:
        return ""
    best = min(simpler, key=lambda name: badness(main, values[name]))
    beaten = badness(main, values["personal"]) + SAME_MEASURE < badness(main, values[best])
    return "" if beaten else ADVICE[best]


def values_by_model(measures: Mapping[str, float]) -> dict[str, float]:
    """The main measure of the personal models, of the shared one and of own rows alone."""
    main = measure_of(measures)
    keys = {"personal": main, "shared": SHARED + main, "alone": LOCAL + main}
    return {name: measures[key] for name, key in keys.items() if key in measures}


def gain_texts(saved: SavedRun) -> list[str]:
    """How many users gain by the personal model over own rows alone; empty if it is not known."""
    if saved.people.empty:
        return []
    gains = saved.people["gain"].dropna()
    if gains.empty:
        return []
    return [f"{(gains > SAME_MEASURE).sum():,} of {len(gains):,} users gain"]


def progress_bar(unit: str = "rounds", *, transient: bool = False) -> Progress:
    """A bar with what is done, in this unit, and the time left.

    Args:
        unit: what is counted.
        transient: erased at the end, and shown only on a terminal.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} " + unit),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=transient and not console.is_terminal,
    )


def progress_hook(progress: Progress, label: str, rounds: int) -> OnRound:
    """A callback that shows the round, ε and the first two of the latest measures."""
    task = progress.add_task(label, total=rounds, state="")

    def show_round(round_: int, result: "Result", ledger: "Ledger") -> None:
        state = f"ε ≤ {rounded_up(ledger.quick_epsilon())}"
        if ledger.insecure_rounds:
            state = NO_GUARANTEE
        evaluated = result.evaluate_metrics_clientapp
        if evaluated:
            latest = list(evaluated[max(evaluated)].items())
            state = "  ".join([state, *(f"{name} {value:.4g}" for name, value in latest[:2])])
        progress.update(task, completed=round_, state=state)

    return show_round


def sweep_hook(progress: Progress) -> OnProgress:
    """A callback that prints the plan, and shows settings × rounds and the time left."""
    task = progress.add_task("sweep", total=None, state="")
    shown = ""

    def show_progress(plan: str, done: int, total: int) -> None:
        nonlocal shown
        if plan != shown:  # also of a grid that was extended
            shown = plan
            progress.console.print(plan, highlight=False, soft_wrap=True)
        progress.update(task, completed=done, total=total)

    return show_progress
