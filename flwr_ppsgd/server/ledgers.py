"""What ``ppsgd ledger`` does: show journals and budgets, check them, add charges that were lost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.checks import count as whole_number
from flwr_ppsgd.checks import require
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.server import budget as budgets
from flwr_ppsgd.server import checkpoint, journal
from flwr_ppsgd.server.budget import Budget, Spending, read_spending, spending_of
from flwr_ppsgd.server.chain import Chain
from flwr_ppsgd.server.journal import Story, read_story, story_of
from flwr_ppsgd.server.record import Record
from flwr_ppsgd.signature import KEY, TrainingKey


def describe(directories: Sequence[Path]) -> str:
    """What the journals and budgets in these directories tell, and whether anything is missing.

    Nothing is locked or changed. ValueError if one is damaged or not there.

    Args:
        directories: checkpoint directories, and directories of budgets.
    """
    parts = []
    stories = []
    for directory in directories:
        if (directory / budgets.NAME).is_file():
            parts.append(_budget_in_words(directory, read_spending(directory)))
        else:
            story = read_story(directory)
            stories.append(story)
            parts.append(_journal_in_words(directory, story))
    if len(stories) > 1:
        parts.append(_together(stories))
    return "\n\n".join(parts)


def add_charges(directory: Path, count: int, reason: str) -> None:
    """Write down charges that are known to have happened and that the file does not show.

    They count as releases of the journal's first kind; in a budget, of the dearest kind.

    Args:
        directory: where the journal, or the budget, is. No training may be running there.
        count: how many.
        reason: why, for whoever reads the journal later.
    """
    whole_number("count", count)
    rule = "reason must be a text"
    require(bool(reason.strip()), rule, reason, "say how it is known that they happened")
    if (directory / budgets.NAME).is_file():
        _add_to_budget(directory, count, reason)
    else:
        _add_to_journal(directory, count, reason)


def _add_to_journal(directory: Path, count: int, reason: str) -> None:
    story = read_story(directory)
    budget = None if story.budget is None else Budget(Path(story.budget_dir))
    chain = Chain(directory / journal.NAME)
    try:
        with chain.locked(journal.PATIENCE):
            chain.refresh()
            chain.append({"added": count, "reason": reason})
            story = story_of(chain.told, chain.path)
            _raise_record(story.training, directory, story.ledger.rounds)
            if budget is not None:
                budget.catch_up(story.training, story.counts)
    finally:
        chain.close()
        if budget is not None:
            budget.close()


def _add_to_budget(directory: Path, count: int, reason: str) -> None:
    read_spending(directory)
    chain = Chain(directory / budgets.NAME)
    try:
        with chain.locked(budgets.PATIENCE):
            chain.refresh()
            chain.append({"added": count, "reason": reason})
            spending = spending_of(chain.told, chain.path)
            _raise_record(spending.budget, directory, spending.charged)
    finally:
        chain.close()


def _raise_record(training: int, directory: Path, charged: int) -> None:
    """Bring the outside record up to the file; it is never lowered."""
    record = Record(training, directory)
    known = record.read()
    if known is None or known < charged:
        record.write(charged)


def _journal_in_words(directory: Path, story: Story) -> str:
    ledger = story.ledger
    evaluated = "yes" if story.evaluated else "no"
    starts = ", ".join(map(str, story.starts))
    lines = [
        f"{directory}",
        f"training {story.training}",
        f"charged: {ledger.rounds} releases",
        *_releases(story.counts),
        f"planned: {story.planned} charges in {story.planned_rounds} rounds",
        f"starts of the server: {len(story.starts)}, before rounds {starts or 'none'}",
        f"evaluation on client data: {evaluated}",
        f"insecure rounds: {ledger.insecure_rounds}",
        f"torn lines: {story.torn}, each counted as one charge",
    ]
    key = directory / KEY
    if key.is_file():
        lines.append(f"clients may pin ppsgd-server-key = {TrainingKey.load(key).public}")
    for times, reason in story.added:
        lines.append(f"added by hand: {times} charges ({reason})")
    for caveat in story.caveats:
        lines.append(f"caveat: {caveat}")
    lines += _costs(story, ledger)
    lines += _checks(directory, story)
    return "\n  ".join(lines)


def _costs(story: Story, ledger: Ledger) -> list[str]:
    """ε of what was charged, of what is planned, and where the guarantee comes from."""
    lines = ["spent: " + _epsilons(ledger)]
    missing = story.planned - ledger.rounds
    if missing > 0:
        first = story.kinds[journal.FIRST]
        planned = ledger.record(first, missing)
        lines.append("planned: " + _epsilons(planned))
    if story.budget is not None:
        lines.append(f"under the budget in {story.budget_dir}, whose epsilon is the guarantee")
    return lines


def _budget_in_words(directory: Path, spending: Spending) -> str:
    allowance = spending.allowance
    replace_one = rounded_up(allowance.epsilon_replace_one())
    order = f" at order {allowance.order:g}" if allowance.order else ""
    share = spending.spent() / allowance.limit
    trainings = {training for training, _ in spending.charges}
    counts: Counter[Release] = Counter()
    for (_, kind), times in spending.charges.items():
        release = spending.kinds[kind]
        counts[release] += times
    lines = [
        f"{directory}",
        f"budget {spending.budget}: epsilon = {allowance.epsilon:g} (zero-out), {replace_one} "
        f"(replace-one) at delta = {allowance.delta:g}, for all trainings together",
        f"filter: {allowance.filter}{order}",
        f"trainings: {len(trainings)}",
        f"charged: {spending.charged} releases, {share:.2%} of the budget",
        *_releases(counts),
        f"charges of which nothing more is known: {spending.unknown}",
    ]
    for caveat in spending.caveats:
        lines.append(f"caveat: {caveat}")
    known = Record(spending.budget, directory).read()
    lines.append(_compared(directory, spending.charged, known, "the record outside"))
    return "\n  ".join(lines)


def _together(stories: Sequence[Story]) -> str:
    """Several trainings of one population."""
    budgets_joined = {story.budget for story in stories}
    if len(budgets_joined) == 1 and None not in budgets_joined:
        return (
            f"together: all are under the budget in {stories[0].budget_dir}, which was fixed "
            "before them; its epsilon is the guarantee"
        )
    delta = min(story.delta for story in stories)
    insecure = sum(story.ledger.insecure_rounds for story in stories)
    ledger = Ledger(delta, insecure_rounds=insecure)
    for story in stories:
        for release, times in story.counts.items():
            ledger = ledger.record(release, times)
    return (
        f"together, spent so far: {_epsilons(ledger)}\n  This is not a guarantee if trainings were "
        "chosen after seeing earlier ones. A guarantee for several trainings is a budget that is "
        "fixed before the first (budget_dir)."
    )


def _releases(counts: Mapping[Release, int]) -> list[str]:
    return [f"  {times} x {release}" for release, times in counts.items()]


def _epsilons(ledger: Ledger) -> str:
    """ε under both kinds of neighbours, rounded up; infinite if nothing is guaranteed."""
    zero_out = math.inf
    replace_one = math.inf
    if not ledger.insecure_rounds:
        zero_out = ledger.epsilon()
        replace_one = ledger.epsilon("replace-one")
    first = rounded_up(zero_out)
    second = rounded_up(replace_one)
    return f"epsilon = {first} (zero-out), {second} (replace-one) at delta = {ledger.delta:g}"


def _checks(directory: Path, story: Story) -> list[str]:
    """Whether w and the outside record know of more charges than the journal."""
    charged = story.ledger.rounds
    found = checkpoint.load(directory)
    by_w = None if found is None else found.charged
    recorded = Record(story.training, directory).read()
    return [
        _compared(directory, charged, by_w, "the checkpoint of w"),
        _compared(directory, charged, recorded, "the record outside"),
    ]


def _compared(directory: Path, charged: int, known: int | None, who: str) -> str:
    if known is None:
        return f"check: {who} is missing"
    missing = known - charged
    if missing <= 0:
        return f"check: {who} shows {known} charges, none is missing"
    return (
        f"check: {who} shows {known} charges, so {missing} are MISSING here: put the newest file "
        f"back, or add them with: ppsgd ledger {directory} --add {missing}"
    )
