"""Summarise the rows of a sweep in data frames: means over seeds, and the best settings.

A frame has a row for each setting and round. ``method``, ``alpha-q``, ``noise-multiplier``,
``step``, ``clip-norm`` and ``target-epsilon`` name the setting; at α = 0, where nothing is
released, noise and clip norm are missing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flwr_ppsgd.lab.measures import as_test_measure, badness, measure_of
from flwr_ppsgd.lab.rows import BASELINES, CAVEAT, OWN_TRIVIAL, PPSGD, TRIVIAL, SweepRow
from flwr_ppsgd.learner import LOCAL as LOCAL_PREFIX
from flwr_ppsgd.settings import AUTO, key_of
from flwr_ppsgd.statement import rounded_up

SETTING = ["method", "alpha-q", "noise-multiplier", "step", "clip-norm", "target-epsilon"]
CHOSEN = ["alpha-q", "step", "clip-norm"]  # what a sweep of the paper's method chooses
SAME_EPSILON = 0.02  # the relative difference up to which two ε count as one noise level
ZERO_OUT = "zero-out neighbours"
PAPERS = "as the paper counts it for cohorts of a fixed size, not a guarantee"
PERSONALIZED = "personalized"
LOCAL = "local"
GLOBAL = "global"
LOCAL_SOLVED = "local-solved"  # own rows alone, solved as the recipe does
PEEKED = "if chosen on test"
ERROR = "standard error"
EPSILON = "deployed_epsilon"
TRIVIAL_WORDS = {
    TRIVIAL: "Without features, with everyone's mean or most frequent class",
    OWN_TRIVIAL: "Without features, with each user's own",
}


# --- frames


def frame_of(rows: Iterable[SweepRow]) -> pd.DataFrame:
    """A row for each setting, seed and round; a measure of a setting that diverged is missing."""
    records = []
    for row in rows:
        record: dict[str, Any] = {} if row.diverged else dict(row.measures)
        record |= {key_of(name): value for name, value in vars(row.point).items()}
        record |= {"round": row.round, "diverged": row.diverged, "epsilon": row.shown_epsilon()}
        records.append(record)
    frame = pd.DataFrame(records)
    numbers = [*SETTING[1:], "epsilon"]
    frame[numbers] = frame[numbers].astype(float)
    return frame


def means_over_seeds(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Means over seeds, for each setting and round at which no seed has diverged.

    ``value`` and ``error`` are the mean and its standard error; ``reported`` and
    ``reported_error`` are the same on test rows, if all seeds were measured there. ``level`` is
    the noise level; that of the recipe is the one of the paper's method that costs the same ε.
    """
    frame = frame.assign(_tested=frame[as_test_measure(measure)])
    groups = frame.groupby([*SETTING, "round"], dropna=False)
    found = groups.agg(
        epsilon=("epsilon", "first"),
        value=(measure, "mean"),
        error=(measure, "sem"),
        seeds=(measure, "count"),
        reported=("_tested", "mean"),
        reported_error=("_tested", "sem"),
        opened=("_tested", "count"),
    ).reset_index()
    wanted = groups.size().groupby(level=SETTING, dropna=False).transform("max").to_numpy()
    found = found[found["seeds"] == wanted]
    closed = found["opened"] < found["seeds"]
    found.loc[closed, "reported"] = found["value"]
    found.loc[closed, "reported_error"] = found["error"]
    return _with_levels(found.drop(columns="opened"))


def _with_levels(found: pd.DataFrame) -> pd.DataFrame:
    """With the column ``level``: z, and for the recipe the z of the paper's method at its ε."""
    found = found.assign(level=found["noise-multiplier"])
    ends = last_rounds(found)
    paper = ends[(ends["method"] == PPSGD) & ends["level"].notna()]
    epsilons = paper.drop_duplicates("level").set_index("level")["epsilon"]
    for index, spent in found.loc[found["method"] == AUTO, "epsilon"].items():
        near = (epsilons - spent).abs() <= SAME_EPSILON * epsilons.clip(upper=spent)
        same = epsilons.index[near | (epsilons == spent)]
        if len(same):
            found.loc[index, "level"] = same[0]
    return found


def best_rows(candidates: pd.DataFrame, measure: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """The row with the best value, or one for each value of ``by``; the first of equals."""
    ordered = candidates.assign(badness=badness(measure, 1.0) * candidates["value"])
    ordered = ordered.sort_values(["badness", *SETTING[1:5]], kind="stable").drop(columns="badness")
    if not by:
        return ordered.head(1)
    return ordered.drop_duplicates(list(by)).sort_values(list(by))


def rows_at_level(found: pd.DataFrame, level: float) -> pd.DataFrame:
    """The rows of one noise level, and those of local learning, which has none."""
    return found[(found["level"] == level) | found["level"].isna()]


def levels_of(found: pd.DataFrame) -> list[float]:
    """The noise levels, in order."""
    return sorted(found["level"].dropna().unique().tolist())


def last_rounds(every: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last round, and those of the recipe, which is measured once."""
    is_recipe = every["method"] == AUTO
    last = every.loc[~is_recipe, "round"].max()
    return every[is_recipe | (every["round"] == last)]


def with_ways(every: pd.DataFrame, *, each_alpha: bool = False) -> pd.DataFrame:
    """With the column ``way``: local, global, personalized, or the name of another method.

    Args:
        every: from ``means_over_seeds``.
        each_alpha: each αQ between the ends is a way of its own.
    """
    alpha = every["alpha-q"]
    between = PERSONALIZED
    if each_alpha:
        between = alpha.map("αQ = {:g}".format)
    way = every["method"].mask(every["method"] == PPSGD, between)
    way = way.mask((every["method"] == PPSGD) & (alpha == 0), LOCAL)
    way = way.mask((every["method"] == PPSGD) & (alpha == math.inf), GLOBAL)
    return every.assign(way=way)


def best_table(
    every: pd.DataFrame, measure: str, trivial: float | None, alone: float | None
) -> pd.DataFrame:
    """The best setting for each noise level at the end of training, beside the other ways.

    Args:
        every: from ``means_over_seeds``.
        measure: by which settings are compared.
        trivial: the measure without features; None if it is not known.
        alone: the measure of the recipe's models from own rows alone; None if it was not run.
    """
    tested = as_test_measure(measure)
    ends = last_rounds(every)
    candidates = ends[ends["method"] == PPSGD]
    if candidates.empty:  # the recipe was run alone: nothing was chosen
        candidates = ends[ends["method"] == AUTO].assign(**dict.fromkeys(CHOSEN, math.nan))
    best_ways = best_rows(with_ways(ends), measure, ["way", "level"])
    rows = []
    for level in levels_of(candidates):
        here = rows_at_level(candidates, level)
        chosen = best_rows(here, measure).iloc[0]
        row: dict[str, Any] = {"noise-multiplier": level, EPSILON: here["epsilon"].max()}
        row |= {key: chosen[key] for key in CHOSEN}
        row[measure] = chosen["value"]
        if tested != measure:
            row[tested] = chosen["reported"]
            sign = badness(measure, 1.0)
            row[PEEKED] = sign * (sign * here["reported"]).min()
        row[ERROR] = chosen["reported_error"]
        reported = rows_at_level(best_ways, level).set_index("way")["reported"]
        row |= {way: reported.get(way, math.nan) for way in (LOCAL, GLOBAL, PERSONALIZED)}
        row |= {way: reported[way] for way in (*BASELINES, AUTO) if way in reported}
        if alone is not None:
            row[LOCAL_SOLVED] = alone
        if trivial is not None:
            row[TRIVIAL] = trivial
        rows.append(row)
    if not rows:
        return pd.DataFrame(columns=["noise-multiplier", EPSILON, *CHOSEN])
    table = pd.DataFrame(rows)
    one_seed = table[ERROR].isna().all()
    return table.drop(columns=ERROR) if one_seed else table


def edges_of(table: pd.DataFrame, settings: pd.DataFrame) -> pd.DataFrame:
    """The lists of the grid at whose end a best setting lies: their ``key``, the ``value`` at that
    end, and the next value ``beyond`` it.

    αQ = 0 and αQ = ∞ are natural ends and do not count.
    """
    found = []
    for key in CHOSEN:
        values = sorted(settings[key].dropna().unique().tolist())
        if key == "alpha-q":
            values = [value for value in values if 0 < value < math.inf]
        if len(values) < 2:
            continue
        chosen = table[key].unique().tolist()
        for end, next_to in (values[:2], values[:-3:-1]):
            if end in chosen:
                found.append((key, end, float(f"{end**2 / next_to:.3g}")))
    return pd.DataFrame(found, columns=["key", "value", "beyond"])


# --- in words


@dataclass(frozen=True)
class Summary:
    """The results of a sweep.

    Args:
        measure: by which settings are compared.
        every: each setting at each reported round, from ``means_over_seeds``.
        table: the best setting for each noise level.
        kind: which ε is meant.
        settings: the number of settings; those that differ only by seed count once.
        diverged: the number of those that diverged.
        smallest_step: of all settings.
        edges: where the best setting lies at the end of a list, as ``edges_of`` says.
        trivial: measures on test rows of answers without features, by method.
    """

    measure: str
    every: pd.DataFrame
    table: pd.DataFrame
    kind: str
    settings: int
    diverged: int
    smallest_step: float
    edges: pd.DataFrame
    trivial: dict[str, float]

    @property
    def test_measure(self) -> str:
        """The same measure on test rows."""
        return as_test_measure(self.measure)

    def text(self) -> str:
        """The table, the caveats about ε, and remarks on the grid."""
        lines = [self.count_text()]
        if not self.every.empty:
            lines += self._table_lines()
        lines += self.remarks()
        if self.kind == PAPERS:
            lines.append(f"Epsilon here is {PAPERS}: rows.jsonl has the honest one beside it.")
        return "\n".join(lines)

    def _table_lines(self) -> list[str]:
        """The table under its heading, and what ε does not cover."""
        if self.table.empty:
            return [CAVEAT]
        head = "Best setting for each noise level, at the end of training:"
        if self.test_measure != self.measure:
            head = (
                "Best setting for each noise level at the end of training, chosen on validation "
                f"rows. {self.test_measure} and all columns after it are on test rows:"
            )
        formats = dict.fromkeys(self.table, "{:.4g}".format) | {EPSILON: rounded_up}
        return [head, self.table.to_string(index=False, na_rep="-", formatters=formats), CAVEAT]

    def count_text(self) -> str:
        """The number of settings and of those that diverged; a remedy if all did."""
        words = f"{self.settings:,} settings, {self.diverged:,} of them diverged"
        if not self.every.empty:
            return f"{words}."
        return (
            f"{words}: there is nothing to compare. The smallest step was {self.smallest_step:g}: "
            f"use smaller ones, as in --set step=[{self.smallest_step / 30:g}, "
            f"{self.smallest_step / 10:g}], or bring features to a scale of 1 (scale = 'auto', or "
            "see ppsgd look)."
        )

    def remarks(self) -> list[str]:
        """On which rows settings were chosen, the ends of the grid, answers without features."""
        lines = [self.chosen_on()]
        for edge in self.edges.itertuples():
            lines.append(
                f"The best {edge.key}, {edge.value:g}, is at the end of its list: ppsgd sweep "
                f"--extend adds {edge.beyond:.3g}."
            )
        for name, value in self.trivial.items():
            lines.append(f"{TRIVIAL_WORDS[name]}: {value:.4g}.")
        if TRIVIAL in self.table:
            sign = badness(self.measure, 1.0)
            reached = self.table[self.test_measure]
            worse = self.table[sign * reached >= sign * self.table[TRIVIAL]]
            levels = ", ".join(f"{z:.4g}" for z in worse["noise-multiplier"])
            if levels:
                lines.append(
                    "No setting beats the better answer without features at noise z = "
                    f"{levels}: look at scales and steps with ppsgd look, or allow a larger ε."
                )
        return [line for line in lines if line]

    def chosen_on(self) -> str:
        """On which rows settings were chosen, and how optimistic the numbers are."""
        if self.table.empty or self.measure == "excess_risk":
            return ""
        if self.table["step"].isna().all():
            return "Nothing was chosen among settings: the recipe has none."
        if PEEKED not in self.table:
            return (
                "Settings were chosen on the rows that they are measured on: the numbers are "
                "optimistic. select-on = 'validation' shows by how much."
            )
        optimism = (self.table[PEEKED] - self.table[self.test_measure]).abs()
        return (
            f"Choosing on test rows instead would make {self.test_measure} look better by "
            f"{optimism.mean():.2g} on average, and by {optimism.max():.2g} at most."
        )


def summarise(rows: Sequence[SweepRow]) -> Summary:
    """The summary of a sweep's rows, also if every setting diverged."""
    measured = [row for row in rows if row.measures and row.point.method not in TRIVIAL_WORDS]
    going_on = [row for row in measured if not row.diverged]
    measure = measure_of((going_on or measured)[0].measures)
    tested = as_test_measure(measure)
    frame = frame_of(rows)
    for name in (measure, tested):
        if name not in frame:
            frame[name] = math.nan
    is_trivial = frame["method"].isin(TRIVIAL_WORDS)
    trivial = frame[is_trivial].set_index("method")[tested].dropna().to_dict()
    best_answer = min(trivial.values(), key=lambda value: badness(measure, value), default=None)
    frame = frame[~is_trivial]
    alone = None
    recipe = frame[frame["method"] == AUTO]
    if not recipe.empty and LOCAL_PREFIX + tested in recipe:
        alone = float(recipe[LOCAL_PREFIX + tested].mean())
    every = means_over_seeds(frame, measure)
    table = best_table(every, measure, best_answer, alone)
    settings = frame.drop_duplicates(SETTING)
    is_paper_epsilon = any(row.paper_epsilon is not None for row in rows)
    return Summary(
        measure=measure,
        every=every,
        table=table,
        kind=PAPERS if is_paper_epsilon else ZERO_OUT,
        settings=len(settings),
        diverged=len(frame[frame["diverged"]].drop_duplicates(SETTING)),
        smallest_step=float(settings.loc[settings["step"] > 0, "step"].min()),
        edges=edges_of(table, settings[settings["method"] == PPSGD]),
        trivial={str(method): float(value) for method, value in trivial.items()},
    )
