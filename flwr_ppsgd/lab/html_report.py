"""One self-contained page about a sweep or a run: the result, its picture, the guarantee.

Nothing here trains. The page contains its figures and needs no network, script or font.
"""

import base64
import importlib.resources
import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import pandas as pd

from flwr_ppsgd.lab import disk
from flwr_ppsgd.lab.figures import cost_text, draw_figures
from flwr_ppsgd.lab.measures import LABELS, measure_of
from flwr_ppsgd.lab.outputs import (
    METRICS,
    PAGE,
    PICTURE,
    ROWS,
    USERS_PICTURE,
    SavedRun,
    finished_rows,
    is_run,
    planned_settings,
    read_config,
    read_run,
    read_selection,
)
from flwr_ppsgd.lab.rows import CAVEAT, GRID, SweepRow
from flwr_ppsgd.lab.screen import gain_texts, values_by_model
from flwr_ppsgd.lab.summary import (
    EPSILON,
    GLOBAL,
    LOCAL,
    PERSONALIZED,
    TRIVIAL_WORDS,
    Summary,
    summarise,
)
from flwr_ppsgd.settings import AUTO
from flwr_ppsgd.statement import OUTSIDE, rounded_up

Context: TypeAlias = dict[str, Any]  # the variables of the template

TEMPLATE = "report.html.jinja"
EPSILONS = ("epsilon", EPSILON)
NAMES = {
    **LABELS,
    "epsilon": "ε guaranteed",
    EPSILON: "ε of a deployment",
    "noise-multiplier": "noise z",
    "alpha-q": "αQ",
    "clip-norm": "clip norm C",
    "insecure-seed": "seed",
    "trivial": "without features",
    "delta": "δ",
}
FIGURES = {
    "figure-1": (
        "Figure 1. The measure against rounds: a panel for each noise multiplier z, a curve for "
        "each αQ with its best step at each round, ε along the top."
    ),
    "figure-2": (
        "Figure 2. The measure at the end of training against ε: local learning, global learning, "
        "each αQ between them with its best step, and in grey the best over αQ."
    ),
    "methods": (
        "Every method. The measure at the end of training against ε, each with its best setting; "
        "without noise, and without features."
    ),
}
OF_A_RUN = {
    "users": (
        "The shared model, models from own rows alone and personal models over all users; what "
        "each user gains by the personal model over own rows alone, in the order of the gain."
    ),
    "learning": "The measure against rounds, ε along the top.",
}
BEST_CAPTION = (
    "The best setting for each noise level at the end of training, beside local and global learning"
)
SIMULATED = (
    "NO GUARANTEE: this is a simulation. Its noise comes from a known seed and is summed in "
    "floating point; it protects nobody. ε says what a deployment of the same setting would cost."
)
WOULD_PROMISE = (
    "A deployment would promise each user: everybody else together, even pooling their data and "
    "personal models, learns no more about your data than (ε, {})-joint differential privacy "
    "allows. ε is for zero-out neighbours: a user contributes nothing instead. For replace-one "
    "neighbours, the paper's definition, it is larger; ppsgd plan prints by how much. Local "
    "learning (α = 0) publishes nothing: its ε is 0."
)
NOT_AMPLIFIED = "Cohorts have a fixed size: no amplification by sampling is claimed."
MEASURED = "The measures come from the users' own data. They are outside the guarantee."


def write_report(directory: Path) -> Path:
    """``report.html`` in the directory of a sweep or of a run."""
    config = read_config(directory)
    if is_run(directory):
        kind = "Run"
        about = _run_context(read_run(directory))
    else:
        kind = "Sweep"
        about = _sweep_context(directory, config)
    text = importlib.resources.files("flwr_ppsgd.lab").joinpath(TEMPLATE).read_text("utf-8")
    template = jinja2.Environment(autoescape=True).from_string(text)
    page = template.render(
        title=f"{kind}: {directory.resolve().name}",
        settings=[(key, _format_value(value, key)) for key, value in config.items() if value != ""],
        version=version("flwr-ppsgd"),
        **about,
    )
    path = directory / PAGE
    disk.write_text(path, page)
    return path


def _sweep_context(directory: Path, config: Mapping[str, Any]) -> Context:
    rows = finished_rows(directory)
    found = summarise(rows)
    with tempfile.TemporaryDirectory() as drawn:
        written = draw_figures(found, Path(drawn))
        pictures = [_picture(path, FIGURES) for path in written if path.suffix == ".png"]
    delta = _format_value(config.get("delta"))
    guarantee = [SIMULATED, CAVEAT, WOULD_PROMISE.format(delta)]
    if "cohort-size" in config:
        guarantee.append(NOT_AMPLIFIED)
    remarks = [] if not found.every.empty else [found.count_text()]
    remarks += [*found.remarks(), *(cost_text(cost) for cost in read_selection(directory))]
    return {
        "results": _best_lines(found),
        "pictures": pictures,
        "lead": _sweep_lead(directory, config, rows),
        "guarantee": [*guarantee, MEASURED],
        "outside": OUTSIDE,
        "best_title": "Best settings",
        "best": _html_table(found.table, BEST_CAPTION),
        "remarks": remarks,
        "file": ROWS,
        "rows": f"{len(rows)} rows, one for each setting and round",
    }


def _best_lines(found: Summary) -> list[str]:
    """The measure that each way reaches, a line for each ε."""
    lines = []
    for row in found.table.to_dict("records"):
        level = f"ε = {rounded_up(row[EPSILON])}" if row["noise-multiplier"] else "Without noise"
        reached = {name: row.get(name, math.nan) for name in (AUTO, PERSONALIZED, GLOBAL, LOCAL)}
        parts = [f"{name} {value:.4g}" for name, value in reached.items() if not math.isnan(value)]
        lines.append(f"{level}: {_readable_key(found.test_measure)} {', '.join(parts)}")
    return lines or [found.count_text()]


def _sweep_lead(directory: Path, config: Mapping[str, Any], rows: Sequence[SweepRow]) -> str:
    last = max(row.round for row in rows)
    settings = [row for row in rows if row.point.method not in TRIVIAL_WORDS]
    finished = sum(row.is_last(last) for row in settings)
    diverged = len({row.point for row in rows if row.diverged})
    planned = planned_settings(directory)
    if planned is None:
        planned = finished
    lists = [key for key in GRID if isinstance(config.get(key), list)]
    grid = ", ".join(f"{len(config[key])} of {_readable_key(key)}" for key in lists)
    text = f"{planned} trainings of Personalized-Private-SGD"
    text += f": {grid}. " if grid else ". "
    text += f"{_data_and_cohort(config)}, {last} rounds, δ = {_format_value(config.get('delta'))}."
    if finished < planned:
        text += f" {finished} of them are finished; this page is about those."
    if diverged:
        text += f" {diverged} diverged and are left out."
    return text


def _data_and_cohort(config: Mapping[str, Any]) -> str:
    """The data, the number of users, and how a cohort is drawn."""
    rate = config.get("rate", 1.0)
    drawn = "all" if rate == 1 else f"each with chance {_format_value(rate)}"
    if "cohort-size" in config:
        drawn = f"exactly {config['cohort-size']}"
    data = Path(str(config.get("data", "unknown"))).name
    return f"Data: {data}. Users: {_format_value(config.get('population'))}, {drawn} in each round"


def _run_context(saved: SavedRun) -> Context:
    paths = [saved.directory / name for name in (USERS_PICTURE, PICTURE)]
    records = []
    for row in saved.rows:
        cost = {"epsilon": row.epsilon, EPSILON: row.deployed_epsilon}
        records.append({**row.measures, **cost, "round": row.round})
    rows = pd.DataFrame(records)
    rounds = f"{saved.rounds_trained} rounds of Personalized-Private-SGD"
    results = []
    measures = saved.last_measures()
    if measures:
        values = values_by_model(measures)
        parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        result = f"{_readable_key(measure_of(measures))}: {parts}"
        results = ["; ".join([result, *gain_texts(saved)]), MEASURED]
    return {
        "results": results,
        "pictures": [_picture(path, OF_A_RUN) for path in paths if path.exists()],
        "lead": f"{rounds}. {_data_and_cohort(saved.config)}.",
        "guarantee": saved.statement,
        "best_title": "At the end",
        "best": _html_table(rows.tail(1), "The last evaluated round"),
        "every": _html_table(rows, "Every evaluated round"),
        "file": METRICS,
        "rows": f"{len(rows)} rows, one for each evaluated round",
    }


def _picture(path: Path, captions: Mapping[str, str]) -> dict[str, str]:
    """A PNG as a data URL, with its caption."""
    data = base64.b64encode(path.read_bytes()).decode()
    return {"text": captions[path.stem], "source": f"data:image/png;base64,{data}"}


def _html_table(frame: pd.DataFrame, caption: str) -> dict[str, Any] | None:
    """The table of a frame, with columns of ε first; None if it is empty."""
    if frame.empty:
        return None
    keys = sorted(frame.columns, key=lambda key: key not in EPSILONS)
    rows = []
    for record in frame.to_dict("records"):
        rows.append([_format_value(record[key], key) for key in keys])
    columns = [_readable_key(key) for key in keys]
    return {"caption": caption, "columns": columns, "rows": rows}


def _readable_key(key: str) -> str:
    """A key as a heading."""
    return NAMES.get(key, key.replace("-", " ").replace("_", " "))


def _format_value(value: Any, key: str = "") -> str:
    """A value with four digits; ∞, – for none, the ends of αQ by name, and ε rounded up."""
    if isinstance(value, list):
        return ", ".join(_format_value(item, key) for item in value)
    if value is None or value == "":
        return "–"
    if not isinstance(value, float):
        return str(value)
    if key == "alpha-q" and value in (0, math.inf):
        return "∞ (global)" if value else "0 (local)"
    text = rounded_up(value) if key in EPSILONS else f"{value:.4g}"
    return text.replace("inf", "∞").replace("nan", "–")
