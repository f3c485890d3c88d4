"""What the rows of a sweep say, as data frames: means over seeds, and the best settings.

A frame has a row for each setting and round. ``method``, ``alpha-q``, ``noise-multiplier``,
``step``, ``clip-norm`` and ``target-epsilon`` name the setting; at α = 0, where nothing is
released, noise and clip norm are missing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flwr_ppsgd.lab.measures import badness, measure_of, on_test
from flwr_ppsgd.lab.rows import BASELINES, CAVEAT, OWN_TRIVIAL, PPSGD, TRIVIAL, GridEdge, SweepRow
from flwr_ppsgd.settings import AUTO, key_of
from flwr_ppsgd.statement import rounded_up

SETTING = ["method", "alpha-q", "noise-multiplier", "step", "clip-norm", "target-epsilon"]
CHOSEN = ["alpha-q", "step", "clip-norm"]  # what a sweep of the paper's method chooses
SAME_EPSILON = 0.02  # by which part two ε may differ and count as one noise level
ZERO_OUT = "zero-out neighbours"
PAPERS = "as the paper counts it for cohorts of a fixed size, not a guarantee"
PERSONALIZED = "personalized"
LOCAL = "local"
GLOBAL = "global"
LOCAL_SOLVED = "local-solved"  # own rows alone, solved as the recipe does
OWN_ROWS = "local_"  # before the name of a measure: of a model from own rows alone
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


def means(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Over seeds, for each setting and round at which no seed had diverged.

    ``value`` and ``error`` are the mean and its standard error; ``reported`` and
    ``reported_error`` the same on test rows, if they were opened there. ``level`` is the noise
    level; that of the recipe is the one of the paper's method that costs the same ε.
    """
    frame = frame.assign(_tested=frame[on_test(measure)])
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
    found = found.assign(level=found["noise-multiplier"])
    ends = last_rounds(found)
    paper = ends[(ends["method"] == PPSGD) & ends["level"].notna()]
    levels = paper.drop_duplicates("level").set_index("level")["epsilon"]
    for index, spent in found.loc[found["method"] == AUTO, "epsilon"].items():
        for level, other in levels.items():
            if spent == other or abs(spent - other) <= SAME_EPSILON * min(spent, other):
                found.loc[index, "level"] = level
                break
    return found


def best(candidates: pd.DataFrame, measure: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """The row with the best value, or one for each value of ``by``; the first of equals."""
    ordered = candidates.assign(badness=badness(measure, 1.0) * candidates["value"])
    ordered = ordered.sort_values(["badness", *SETTING[1:5]], kind="stable").drop(columns="badness")
    if not by:
        return ordered.head(1)
    return ordered.drop_duplicates(list(by)).sort_values(list(by))


def best_curves(
    every: pd.DataFrame, measure: str, method: str = PPSGD
) -> dict[float, pd.DataFrame]:
    """For each αQ, its best step and clip norm at each noise level and reported round."""
    own = every[every["method"] == method]
    chosen = best(own, measure, ["alpha-q", "level", "round"])
    return {float(alpha): curve for alpha, curve in chosen.groupby("alpha-q")}


def at_level(found: pd.DataFrame, level: float) -> pd.DataFrame:
    """What there is at one noise level; local learning is there at every one."""
    return found[(found["level"] == level) | found["level"].isna()]


def levels_of(found: pd.DataFrame) -> list[float]:
    """The noise levels, in order."""
    return sorted(found["level"].dropna().unique().tolist())


def last_rounds(every: pd.DataFrame) -> pd.DataFrame:
    """The last round of each setting that got to the end; the recipe is measured once."""
    is_recipe = every["method"] == AUTO
    last = every.loc[~is_recipe, "round"].max()
    return every[is_recipe | (every["round"] == last)]


def ways_at(ends: pd.DataFrame, level: float, measure: str) -> dict[str, pd.DataFrame]:
    """Both ends of α and the best between them at one noise level; empty if it was not run."""
    here = at_level(ends[ends["method"] == PPSGD], level)
    alpha = here["alpha-q"]
    return {
        LOCAL: best(here[alpha == 0], measure),
        GLOBAL: best(here[alpha == math.inf], measure),
        PERSONALIZED: best(here[(alpha > 0) & (alpha < math.inf)], measure),
    }


def best_table(
    every: pd.DataFrame, measure: str, trivial: float | None, alone: float | None
) -> pd.DataFrame:
    """The best setting for each noise level at the end of training, and what stands beside it.

    Args:
        every: as of ``means``.
        measure: by which settings are compared.
        trivial: what is reached without features; None if it is not known.
        alone: what the recipe's users reach from own rows alone; None if it was not run.
    """
    ends = last_rounds(every)
    candidates = ends[ends["method"] == PPSGD]
    if candidates.empty:  # the recipe was run alone: nothing was chosen
        candidates = ends[ends["method"] == AUTO].assign(**dict.fromkeys(CHOSEN, math.nan))
    rows = []
    for level in levels_of(candidates):
        here = at_level(candidates, level)
        chosen = best(here, measure).iloc[0]
        row: dict[str, Any] = {"noise-multiplier": level, EPSILON: here["epsilon"].max()}
        row |= {key: chosen[key] for key in CHOSEN}
        row[measure] = chosen["value"]
        if on_test(measure) != measure:
            row[on_test(measure)] = chosen["reported"]
            sign = badness(measure, 1.0)
            row[PEEKED] = sign * (sign * here["reported"]).min()
        row[ERROR] = chosen["reported_error"]
        row |= _other_ways(ends, level, measure)
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


def _other_ways(ends: pd.DataFrame, level: float, measure: str) -> dict[str, float]:
    """What both ends of α, the best between them, each baseline and the recipe report."""
    ways = ways_at(ends, level, measure)
    for method in (*BASELINES, AUTO):
        own = ends[(ends["method"] == method) & (ends["level"] == level)]
        if not own.empty:
            ways[method] = best(own, measure)
    found = {}
    for name, way in ways.items():
        found[name] = math.nan if way.empty else float(way["reported"].iloc[0])
    return found


def edges_of(table: pd.DataFrame, settings: pd.DataFrame) -> tuple[GridEdge, ...]:
    """Where the best settings lie at the ends of the lists of a grid.

    0 and ∞ are the natural ends of αQ, and at α = 0 there is no clip norm.
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
                beyond = float(f"{end**2 / next_to:.3g}")
                found.append(GridEdge(key, end, beyond))
    return tuple(found)


# --- in words


@dataclass(frozen=True)
class Summary:
    """Everything there is to say about a sweep.

    Args:
        measure: by which settings are compared.
        every: each setting at each reported round, as of ``means``.
        table: the best setting for each noise level.
        kind: which ε is meant.
        settings: the number of settings, seeds apart.
        diverged: the number of those that diverged.
        smallest_step: of all.
        edges: where the best setting lies at the end of a list.
        trivial: measures on test rows of answers without features, by method.
    """

    measure: str
    every: pd.DataFrame
    table: pd.DataFrame
    kind: str
    settings: int
    diverged: int
    smallest_step: float
    edges: tuple[GridEdge, ...]
    trivial: dict[str, float]

    def text(self) -> str:
        """The table, and what there is to say about ε and about the grid."""
        lines = [self.count_text()]
        if not self.every.empty:
            lines.append(table_text(self.table, self.measure))
        lines += self.remarks()
        if self.kind == PAPERS:
            lines.append(f"Epsilon here is {PAPERS}: rows.jsonl has the honest one beside it.")
        return "\n".join(lines)

    def count_text(self) -> str:
        """How many settings there are, and how many of them diverged."""
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
        """On which rows settings were chosen, ends of the grid, answers without features."""
        lines = [self.chosen_on()]
        for edge in self.edges:
            lines.append(
                f"The best {edge.key}, {edge.value:g}, is at the end of its list: ppsgd sweep "
                f"--extend adds {edge.beyond:.3g}."
            )
        for name, value in self.trivial.items():
            lines.append(f"{TRIVIAL_WORDS[name]}: {value:.4g}.")
        lines.append(self._not_beaten())
        return [line for line in lines if line]

    def chosen_on(self) -> str:
        """On which rows settings were chosen, and how much that flatters them."""
        if self.table.empty or self.measure == "excess_risk":
            return ""
        if self.table["step"].isna().all():
            return "Nothing was chosen among settings: the recipe has none."
        if PEEKED not in self.table:
            return (
                "Settings were chosen on the rows that they are measured on: the numbers are "
                "optimistic. select-on = 'validation' shows by how much."
            )
        tested = on_test(self.measure)
        optimism = (self.table[PEEKED] - self.table[tested]).abs()
        return (
            f"Choosing on test rows instead would make {tested} look better by "
            f"{optimism.mean():.2g} on average, and by {optimism.max():.2g} at most."
        )

    def _not_beaten(self) -> str:
        """Where no setting beats an answer without features."""
        if TRIVIAL not in self.table:
            return ""
        sign = badness(self.measure, 1.0)
        reached = self.table[on_test(self.measure)]
        worse = self.table[sign * reached >= sign * self.table[TRIVIAL]]
        if worse.empty:
            return ""
        levels = ", ".join(f"{z:.4g}" for z in worse["noise-multiplier"])
        return (
            f"No setting beats the better answer without features at noise z = {levels}: "
            "look at scales and steps with ppsgd look, or allow a larger ε."
        )


def summarise(rows: Sequence[SweepRow]) -> Summary:
    """What the rows of a sweep say; that every setting diverged is a result, too."""
    measured = [row for row in rows if row.measures and row.point.method not in TRIVIAL_WORDS]
    going_on = [row for row in measured if not row.diverged]
    measure = measure_of((going_on or measured)[0].measures)
    tested = on_test(measure)
    frame = frame_of(rows)
    for name in (measure, tested):
        if name not in frame:
            frame[name] = math.nan
    is_trivial = frame["method"].isin(TRIVIAL_WORDS)
    answers = frame[is_trivial].set_index("method")[tested].dropna()
    trivial = {str(method): float(value) for method, value in answers.items()}
    best_answer = min(trivial.values(), key=lambda value: badness(measure, value), default=None)
    frame = frame[~is_trivial]
    every = means(frame, measure)
    recipe = frame[frame["method"] == AUTO]
    alone = None
    if not recipe.empty and OWN_ROWS + tested in recipe:
        alone = float(recipe[OWN_ROWS + tested].mean())
    table = best_table(every, measure, best_answer, alone)
    settings = frame.drop_duplicates(SETTING)
    papers = any(row.paper_epsilon is not None for row in rows)
    return Summary(
        measure=measure,
        every=every,
        table=table,
        kind=PAPERS if papers else ZERO_OUT,
        settings=len(settings),
        diverged=len(frame[frame["diverged"]].drop_duplicates(SETTING)),
        smallest_step=float(settings.loc[settings["step"] > 0, "step"].min()),
        edges=edges_of(table, settings[settings["method"] == PPSGD]),
        trivial=trivial,
    )


def table_text(table: pd.DataFrame, measure: str) -> str:
    """The table as text, the best for each ε, and what ε does not cover."""
    if table.empty:
        return CAVEAT
    head = "Best setting for each noise level, at the end of training:"
    tested = on_test(measure)
    if tested != measure:
        head = (
            "Best setting for each noise level at the end of training, chosen on validation rows. "
            f"{tested} and all columns after it are on test rows:"
        )
    formats = dict.fromkeys(table, "{:.4g}".format) | {EPSILON: rounded_up}
    shown = table.to_string(index=False, na_rep="-", formatters=formats)
    return "\n".join([head, shown, CAVEAT])
