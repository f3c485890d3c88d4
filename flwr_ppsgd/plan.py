"""What to know before training: noise, rounds, signal to noise, the side of Lemma 4.6, the α to start with.

Numbers in, a :class:`Plan` out; nothing here touches data.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

import numpy as np

from flwr_ppsgd.algorithm import Cohort, FixedSize, Poisson, Release
from flwr_ppsgd.privacy import Ledger, affordable_rounds, calibrate_noise
from flwr_ppsgd.promise import json_number
from flwr_ppsgd.settings import key_of, override, typed
from flwr_ppsgd.theory import (
    Minimiser,
    Theorem,
    favours_local,
    noise_scale,
    theorem_b_4,
    threshold_noise_multiplier,
)

SHOWN_ALPHA_QS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, math.inf)
EASED = 30.0  # measured on synthetic problems, not derived: docs/choosing-alpha.md
CHART_SIZE = (48, 7)  # columns, rows
EXPERIMENT_KEYS = {"features": "dimension"}  # an experiment's word for what a plan asks for

ASKED = {  # what cannot be done without, and how it is asked for
    "population": "--population N: how many users are enrolled (1000)",
    "rate": "--rate Q: the chance that a user takes part in a round (0.01), or --cohort-size for exactly so many",
    "rounds": "--rounds T: how many rounds (1000), or --passes with --samples-per-user and --batch-size",
    "samples-per-user": "--samples-per-user S: how many samples a user has (100), to make rounds of --passes",
    "delta": "--delta D: the δ at which ε is stated, well below 1/population (1e-5)",
    "epsilon": "--epsilon E: the ε that all rounds together may cost (2.0), or --noise-multiplier",
    "dimension": "--dimension D: how many shared parameters w has (7850)",
    "batch-size": "--batch-size M: how many samples a user draws in a round (10)",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is made for.

    rate or cohort_size, rounds or passes × samples_per_user, epsilon or noise_multiplier: as in an experiment file.
    dimension: d_w, the number of shared parameters. batch_size: m. clip_norm: C; 1 reads every length in units of C.
    gradient_std: σ, of one sample's gradient at the optimum. smoothness: L. distance: ‖v‖, how far the users' common
    optimum is from the start. spread: root mean square of the users' distances from it. These four are knowledge from
    public data, or guesses; what is not given is assumed, and the plan says so.
    """

    population: int
    rate: float | None = None
    cohort_size: int | None = None
    rounds: int | None = None
    passes: float | None = None
    samples_per_user: float | None = None
    batch_size: int
    dimension: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float = 1.0
    gradient_std: float | None = None
    smoothness: float | None = None
    distance: float | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rounds", "batch_size", "dimension"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{key_of(name)} must be at least 1, got {value!r}")
        for name in ("passes", "samples_per_user", "gradient_std", "smoothness", "distance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{key_of(name)} must be positive and finite, got {value!r}")
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread must not be negative, got {self.spread!r}: 0 is users who share one optimum")
        for one, other in (("rate", "cohort_size"), ("rounds", "passes")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {key_of(other)} are both given: leave one of them out")
        Release(self.cohort(), self.clip_norm, self.noise_multiplier or 0.0)
        Ledger(self.delta)

    @classmethod
    def read(cls, flat: Mapping[str, Any]) -> Self:
        """From flat keys; whatever is missing is asked for, a line each."""
        if lines := missing(flat):
            raise ValueError("\n".join(["a plan needs more numbers:", *(f"  {line}" for line in lines)]))
        hints, names = get_type_hints(cls), {key_of(f.name): f.name for f in fields(cls)}
        return cls(**{names[key]: typed(key, value, hints[names[key]]) for key, value in flat.items() if key in names})

    def cohort(self) -> Cohort:
        if self.cohort_size is not None:
            return FixedSize(self.population, self.cohort_size)
        return Poisson(self.population, self.rate or 0.0)

    def planned_rounds(self) -> int:
        """T, or passes·n/(qm): in a round a user takes part with chance q and then uses m of n samples."""
        if self.rounds is not None:
            return self.rounds
        assert self.passes is not None
        assert self.samples_per_user is not None
        return math.ceil(self.passes * self.samples_per_user / (self.cohort().rate * self.batch_size) - 1e-9)


def gather(path: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys of an experiment file, changed by those given on the command line."""
    flat: dict[str, Any] = {}
    if path is not None:
        try:
            flat = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None
    flat = {EXPERIMENT_KEYS.get(key.replace("_", "-"), key.replace("_", "-")): value for key, value in flat.items()}
    changes = {key_of(name): value for name, value in given.items() if value is not None}
    if {"passes", "samples-per-user"} & changes.keys() and "rounds" not in changes:
        flat.pop("rounds", None)
    return override(flat, changes)


def missing(flat: Mapping[str, Any]) -> list[str]:
    """One line for each thing that is not there and cannot be assumed."""
    has = set(flat)
    if "cohort-size" in has:
        has.add("rate")
    has.add("rounds" if "passes" in has else "samples-per-user")
    if "noise-multiplier" in has:
        has.add("epsilon")
    return [line for key, line in ASKED.items() if key not in has]


def ask(flat: Mapping[str, Any], reply: Callable[[str], str]) -> dict[str, Any]:
    """``flat`` with what is missing, asked for a line at a time."""
    answers = dict(flat)
    for key, line in ASKED.items():
        if line in missing(answers):
            try:
                answers[key] = tomllib.loads(f"value = {reply(line)}")["value"]
            except tomllib.TOMLDecodeError:
                raise ValueError(f"{key} must be a number, as in {line}") from None
    return answers


@dataclass(frozen=True)
class Plan:
    """The answers. Lengths are in the units of ``clip_norm``; noise is that of the average that moves w.

    rounds_half_noise, rounds_twice_noise: by RDP, so at least so many. constant: the c that would make the formula of
    Theorem 5.1 (4.1 without sampling) exact here. threshold_*: of Lemma 4.6; samples is n*.
    critical_gradient_std: the σ up to which local is favoured.
    alpha_q, step_*: the advice, where Theorem B.4 for L/EASED is smallest. bound_alpha_q: where it is for L itself,
    with bound_bias and bound_deviation its two terms. bounds: (αQ, bound on f − f*) for L, both choices included.
    untrained: L·(‖v‖² + spread²)/4, the most that f(0) − f* can be. assumptions: what the advice rests on.
    """

    rounds: int
    epsilon: float
    epsilon_replace_one: float
    epsilon_rdp: float
    noise_multiplier: float
    noise_multiplier_rdp: float
    noise_multiplier_poisson: float
    noise_multiplier_fixed_size: float
    paper_epsilon_not_a_guarantee: float
    epsilon_by_round: tuple[tuple[int, float], ...]
    affordable_rounds: int
    rounds_half_noise: int
    rounds_twice_noise: int
    noise_std: float
    signal_to_noise: float
    constant: float
    samples_used: float
    threshold_samples: float
    threshold_noise_multiplier: float
    critical_gradient_std: float
    favours: str
    alpha_q: float
    step_shared: float
    step_personal: float
    untrained: float
    bound_alpha_q: float
    bound_bias: float
    bound_deviation: float
    bounds: tuple[tuple[float, float], ...]
    assumptions: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Valid JSON: infinity is a word."""
        data: dict[str, Any] = _valid(asdict(self))
        return data


def make(question: Question) -> Plan:
    """Work everything out."""
    rounds, cohort, delta = question.planned_rounds(), question.cohort(), question.delta
    z = question.noise_multiplier
    if z is None:
        assert question.epsilon is not None
        z = calibrate_noise(epsilon=question.epsilon, delta=delta, cohort=cohort, rounds=rounds)
    if z == 0:
        raise ValueError(
            "noise-multiplier must be above 0, got 0: without noise ε is infinite and nothing can be planned"
        )
    release = Release(cohort, question.clip_norm, z)
    ledger = Ledger(delta).record(release, rounds)
    spent = ledger.epsilon()
    if spent == 0:
        raise ValueError(
            f"delta = {delta:g} alone pays for all {rounds} rounds, so that ε is 0 and nothing can be planned: lower "
            "delta, or raise epsilon (lower noise-multiplier)"
        )
    target = question.epsilon or spent
    poisson, fixed = _twins(cohort)
    formula = noise_scale(
        clip_norm=question.clip_norm, rounds=rounds, total=cohort.population, epsilon=spent, delta=delta, constant=1.0
    )
    return Plan(
        rounds=rounds, epsilon=spent, epsilon_replace_one=ledger.epsilon("replace-one"),
        epsilon_rdp=ledger.epsilon(method="rdp"), noise_multiplier=z,
        noise_multiplier_rdp=calibrate_noise(epsilon=target, delta=delta, cohort=cohort, rounds=rounds, method="rdp"),
        noise_multiplier_poisson=z if cohort == poisson and question.noise_multiplier is None
        else calibrate_noise(epsilon=target, delta=delta, cohort=poisson, rounds=rounds),
        noise_multiplier_fixed_size=calibrate_noise(epsilon=target, delta=delta, cohort=fixed, rounds=rounds),
        paper_epsilon_not_a_guarantee=ledger.paper_epsilon(),
        epsilon_by_round=_curve(ledger, release, rounds),
        affordable_rounds=rounds if question.noise_multiplier is None or question.epsilon is None
        else affordable_rounds(max_epsilon=target, delta=delta, release=release),
        rounds_half_noise=_rounds_by_rdp(release, 0.5, target, delta),
        rounds_twice_noise=_rounds_by_rdp(release, 2.0, target, delta),
        noise_std=release.noise_std / release.denominator,
        signal_to_noise=release.denominator / (z * math.sqrt(question.dimension)),
        constant=release.noise_std / release.denominator / formula,
        **_advise(question, release, rounds, target),
    )  # fmt: skip


def _twins(cohort: Cohort) -> tuple[Poisson, FixedSize]:
    """The same expected number of users a round, drawn by coins and drawn exactly."""
    size = max(1, round(cohort.rate * cohort.population))
    return Poisson(cohort.population, cohort.rate), FixedSize(cohort.population, size)


def _rounds_by_rdp(release: Release, factor: float, epsilon: float, delta: float) -> int:
    other = Release(release.cohort, release.clip_norm, release.noise_multiplier * factor)
    return affordable_rounds(max_epsilon=epsilon, delta=delta, release=other, method="rdp")


def _curve(ledger: Ledger, release: Release, rounds: int) -> tuple[tuple[int, float], ...]:
    """ε at up to 48 rounds: exact without sampling; else PLD at T and T/8 and, between these, RDP times the ratio of
    the two, interpolated. Below T/8 the ratio stays."""
    marks = sorted({max(1, math.ceil(rounds * k / CHART_SIZE[0])) for k in range(1, CHART_SIZE[0] + 1)})
    nothing = Ledger(ledger.delta)
    if not release.cohort.amplifies:
        return tuple((t, nothing.record(release, t).epsilon()) for t in marks)
    knots = sorted({max(1, rounds // 8), rounds})
    by_rdp = {t: nothing.record(release, t).epsilon(method="rdp") for t in {*marks, *knots}}
    ratios = [nothing.record(release, t).epsilon() / by_rdp[t] if by_rdp[t] else 1.0 for t in knots]
    return tuple((t, float(by_rdp[t] * np.interp(math.log(t), np.log(knots), ratios))) for t in marks)


def theorem(question: Question, release: Release, rounds: int, sigma: float, smoothness: float) -> Theorem:
    """Theorem B.4 for the plan's numbers, in the additive model."""
    return theorem_b_4(
        population=question.population, rate=release.cohort.rate, rounds=rounds, dimension=question.dimension,
        smoothness=smoothness, variance_w=sigma**2 / question.batch_size,
        variance_theta=sigma**2 / question.batch_size, noise_std=release.noise_std / release.denominator,
    )  # fmt: skip


def _advise(question: Question, release: Release, rounds: int, epsilon: float) -> dict[str, Any]:
    n, q, m = question.population, release.cohort.rate, question.batch_size
    sigma = question.gradient_std or question.clip_norm
    smoothness = question.smoothness or 2.0
    distance = question.distance or 2 * question.clip_norm / smoothness
    side = {"population": n, "rate": q, "batch_size": m, "dimension": question.dimension}
    z_star = threshold_noise_multiplier(**side, sigma=sigma, clip_norm=question.clip_norm)  # type: ignore[arg-type]
    local = favours_local(**side, sigma=sigma, noise_std=release.noise_std / release.denominator)  # type: ignore[arg-type]
    bounds = theorem(question, release, rounds, sigma, smoothness)
    minimiser = Minimiser.additive_norms(n, distance, question.spread)
    best, advised = bounds.best(minimiser), bounds.eased(EASED).best(minimiser)
    best_alpha_q, alpha_q = (chosen.alpha * bounds.denominator for chosen in (best, advised))
    shown = {a: bounds.bound(a / bounds.denominator, minimiser) for a in (*SHOWN_ALPHA_QS, best_alpha_q, alpha_q)}
    return {
        "samples_used": rounds * q * m,
        "threshold_samples": _threshold_rounds(release, z_star, rounds, epsilon, question.delta) * q * m,
        "threshold_noise_multiplier": z_star,
        "critical_gradient_std": sigma * release.noise_multiplier / z_star if z_star else math.inf,
        "favours": "local" if local else "global",
        "alpha_q": alpha_q,
        "step_shared": advised.steps.shared,
        "step_personal": advised.steps.personal,
        "untrained": smoothness * (distance**2 + question.spread**2) / 4,
        "bound_alpha_q": best_alpha_q,
        "bound_bias": best.bias,
        "bound_deviation": best.deviation,
        "bounds": tuple(sorted((a, b.total) for a, b in shown.items())),
        "assumptions": tuple(_assumptions(question, sigma, smoothness, distance)),
    }


def _threshold_rounds(release: Release, z_star: float, rounds: int, epsilon: float, delta: float) -> float:
    """The rounds T* for which the noise that ε needs is z*, so that n* = T*·q·m.

    By RDP, scaled to be right at the plan's own (z, T): RDP is a few percent loose, and equally so nearby.
    """
    cohort = release.cohort
    if not cohort.amplifies:  # z² ∝ T exactly
        return rounds * (z_star / release.noise_multiplier) ** 2

    def by_rdp(z: float) -> int:
        if not z > 1e-3:
            return 0
        return affordable_rounds(max_epsilon=epsilon, delta=delta, release=Release(cohort, 1.0, z), method="rdp")

    here = by_rdp(release.noise_multiplier)
    return by_rdp(z_star) * rounds / here if here else rounds * (z_star / release.noise_multiplier) ** 2


def _assumptions(question: Question, sigma: float, smoothness: float, distance: float) -> list[str]:
    """What the advice rests on, in words; what was given is not repeated."""
    lines = [
        "f is convex and additive, ℓ(y, (w + θ_i)ᵀx), samples are fresh, and the model used is the average over rounds",
        f"no gradient is longer than the clip norm (G ≤ C = {question.clip_norm:g}): clipping is not in the theory",
    ]
    if question.spread == 0:
        lines.append("all users share one optimum (--spread 0): where they differ, more local than this is better")
    if question.gradient_std is None:
        lines.append(f"σ = C = {sigma:g}, the largest it can be (--gradient-std): smaller σ favours local learning")
    if question.smoothness is None:
        lines.append(f"L = {smoothness:g}: squared loss with features of norm at most 1 (--smoothness)")
    if question.distance is None:
        lines.append(f"‖v‖ = 2C/L = {distance:g}: the first gradients are about as long as C (--distance)")
    return lines


def in_words(question: Question, plan: Plan) -> str:
    """The plan as it is printed."""
    return "\n".join(
        [*_privacy_lines(question, plan), "", *chart(plan.epsilon_by_round), "", *_advice_lines(question, plan)]
    )


def _privacy_lines(question: Question, plan: Plan) -> list[str]:
    cohort = question.cohort()
    drawn = f"exactly {cohort.size}" if isinstance(cohort, FixedSize) else f"each with chance {cohort.rate:g}"
    z, rdp = plan.noise_multiplier, plan.noise_multiplier_rdp
    poisson, fixed = plan.noise_multiplier_poisson, plan.noise_multiplier_fixed_size
    needed = fixed if isinstance(cohort, FixedSize) else poisson
    noise = f"{z:.4g} by PLD; RDP would have needed {rdp:.4g}"
    if question.noise_multiplier is not None:
        target = question.epsilon or plan.epsilon
        noise = f"{z:.4g}, as given; for ε = {target:.4g} it takes {needed:.4g} by PLD, {rdp:.4g} by RDP"
    rows = [
        ("plan", f"{cohort.population} users, {drawn} a round, {plan.rounds} rounds, d = {question.dimension}"),
        ("noise multiplier z", noise),
        (f"ε at δ = {question.delta:g}", f"{plan.epsilon:.4g} zero-out: a user contributes nothing "
         f"(RDP {plan.epsilon_rdp:.4g})"),
        ("", f"{plan.epsilon_replace_one:.4g} replace-one: a user's data exchanged, the paper's definition"),
        ("rounds affordable", f"{plan.affordable_rounds}; with half the noise {plan.rounds_half_noise} or more, "
         f"with twice {plan.rounds_twice_noise} or more (RDP)"),
        ("noise on the mean", f"σ_ζ = zC/D = {plan.noise_std:.3g} per coordinate of w, for C = {question.clip_norm:g}"),
        ("signal to noise", f"{plan.signal_to_noise:.3g} per coordinate and round: C/√d, all users agreeing, over σ_ζ"),
        ("fixed-size cohorts", f"need z = {fixed:.4g}, Poisson {poisson:.4g}: {fixed / poisson:.3g} times the noise "
         "for the same ε"),
        ("paper's formula", _formula(cohort, plan)),
    ]  # fmt: skip
    if question.delta * cohort.population > 0.1:
        rows.append(("caution", f"δ should be well below 1/population = {1 / cohort.population:g}"))
    return [f"{name:<19} {text}" for name, text in rows]


def _formula(cohort: Cohort, plan: Plan) -> str:
    """The theorem of the paper that is about these cohorts, and the constant it would need."""
    if cohort.rate == 1:
        return f"Theorem 4.1 gives this σ_ζ for c = {plan.constant:.3g}"
    return (
        f"Theorem 5.1 gives this σ_ζ for c = {plan.constant:.3g}; it asks for ε < c₁q²T, where "
        f"q²T = {cohort.rate**2 * plan.rounds:.3g}"
    )


def _advice_lines(question: Question, plan: Plan) -> list[str]:
    side = "above" if plan.favours == "local" else "below"
    better = "local learning (small α)" if plan.favours == "local" else "global learning (large α)"
    step, critical = max(plan.step_shared, plan.step_personal), plan.critical_gradient_std
    threshold = f"{plan.threshold_samples:.4g} samples a user"
    if plan.threshold_samples * plan.rounds < plan.samples_used:
        threshold = "less than one round"
    assumed_largest = question.gradient_std is None and critical >= question.clip_norm
    lines = [
        f"threshold n* of Lemma 4.6: {threshold}; you use {plan.samples_used:.4g} samples, "
        f"{side} it: the variance favours {better}.",
        f"with this noise it favours local up to σ = {critical:.3g}, global beyond"
        + ("; σ cannot exceed C, so local in any case." if assumed_largest else "."),
        f"start with αQ = {plan.alpha_q:.3g} and step = {step:.3g} (s_w = {plan.step_shared:.3g}, s_θ = "
        f"{plan.step_personal:.3g}): where the bound (Theorem B.4) is smallest for L/{EASED:g}.",
        f"for L itself, which holds for every sample alone, it is smallest at αQ = {plan.bound_alpha_q:.3g}: "
        f"{plan.bound_bias:.3g} (bias, from too few rounds) + {plan.bound_deviation:.3g} (samples and noise).",
        "bound on f − f* by αQ:  " + "  ".join(f"{a:.3g}: {b:.3g}" for a, b in plan.bounds),
    ]
    if plan.bound_bias + plan.bound_deviation >= plan.untrained:
        lines.append(f"caution: not training at all costs at most {plan.untrained:.3g}; take the bound as a direction.")
    if plan.alpha_q == 0:
        lines.append("αQ = 0 releases nothing: ε is then 0, whatever was planned.")
    return [*lines, "assuming that", *(f"  - {line}" for line in plan.assumptions)]


def chart(points: tuple[tuple[int, float], ...]) -> list[str]:
    """ε against rounds as a few lines of text."""
    columns, rows = CHART_SIZE
    ts, epsilons = (np.array(part, dtype=np.float64) for part in zip(*points, strict=True))
    at = np.interp(np.linspace(ts[-1] / columns, ts[-1], columns), ts, epsilons)
    top = float(epsilons[-1])
    eighths = np.rint(at / top * rows * 8).astype(int) if top > 0 else np.zeros(columns, dtype=int)
    lines = []
    for row in range(rows - 1, -1, -1):
        label = f"{top * (row + 1) / rows:8.3g}" if row in (rows - 1, rows // 2) else " " * 8
        lines.append(f"{label} │" + "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, e - 8 * row))] for e in eighths))
    return ["       ε", *lines, " " * 9 + "└" + "─" * columns, f"{'round':>8}  1{points[-1][0]:>{columns - 1}}"]


def _valid(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _valid(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_valid(item) for item in value]
    return json_number(value) if isinstance(value, float) else value
