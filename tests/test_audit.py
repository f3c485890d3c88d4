"""The audit acquits the real mechanism and convicts each broken one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import PPSGD, FixedSize, Poisson, Release, Steps
from flwr_ppsgd.algorithm import PrivateMetrics
from flwr_ppsgd.audit import Audit, Estimate, audit
from flwr_ppsgd.noise import Coins, GridSum
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.rounds import OpenRound

SIZE = 4000
HUNDRED = Release(Poisson(100, 1.0), clip_norm=2.0, noise_multiplier=1.0)


def make(release: Release = HUNDRED, seed: int | None = 1) -> Callable[[], PPSGD]:
    return lambda: PPSGD(release=release, steps=Steps(0.3, 0.1), delta=1e-5, insecure_seed=seed)


def audited(release: Release = HUNDRED, seed: int | None = 1) -> Audit:
    return audit(make(release, seed), planned_rounds=50, size=SIZE)


@pytest.mark.parametrize(
    "release",
    [
        HUNDRED,
        Release(Poisson(1000, 0.1), 0.01, 2.0),
        Release(FixedSize(300, 60), 10.0, 0.5),
        Release(Poisson(200, 1.0), 1.0, 10.0),
        Release(Poisson(200, 0.5, cap=90), 1.0, 1.0, total_batch=2000),
    ],
)
def test_the_real_mechanism_conforms(release: Release) -> None:
    found = audited(release, seed=7)
    assert found.verdict == "conforms", found.in_words()
    assert found.noise_multiplier.value == pytest.approx(release.noise_multiplier, rel=0.05)
    assert found.epsilon_measured == pytest.approx(found.epsilon_charged, rel=0.15)


def test_secret_coins_conform_too() -> None:
    assert audited(seed=None).verdict in ("conforms", "inconclusive")


def test_too_few_users_for_the_noise_are_inconclusive() -> None:
    found = audited(Release(Poisson(20, 0.2), 1.0, 50.0))
    assert found.verdict == "inconclusive"
    assert "inconclusive" in found.in_words()


def scaled_noise(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        normals = Coins.normals
        patch.setattr(Coins, "normals", lambda self, count: normals(self, count) * factor)

    return apply


def missing_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("flwr_ppsgd.noise.clip_scale", lambda *_: 1.0)


def divided_by_the_number_received(patch: pytest.MonkeyPatch) -> None:
    close = OpenRound.close

    def wrong(self: Any, number: int) -> Any:
        before = self._w
        w, measures = close(self, number)
        return before + (w - before) * self._curator.training.release.denominator / max(
            1, self._used
        ), measures

    patch.setattr(OpenRound, "close", wrong)


def reused_noise(patch: pytest.MonkeyPatch) -> None:
    same = "flwr_ppsgd.server.curator.coins_for"
    patch.setattr(same, lambda _, purpose, __: Coins.insecure(0, purpose))


def one_scalar_for_all(patch: pytest.MonkeyPatch) -> None:
    normals = Coins.normals
    patch.setattr(Coins, "normals", lambda self, count: np.full(count, normals(self, 1)[0]))


def nothing_on_empty_rounds(patch: pytest.MonkeyPatch) -> None:
    noisy = GridSum.noisy

    def wrong(self: Any, coins: Coins) -> Any:
        return noisy(self, coins) if np.any(self._multiples) else np.zeros(len(self._multiples))

    patch.setattr(GridSum, "noisy", wrong)


def uncharged_rounds(patch: pytest.MonkeyPatch) -> None:
    charge = Curator._charge
    patch.setattr(
        Curator, "_charge", lambda self, round_: None if round_ % 3 == 0 else charge(self, round_)
    )


def charged_for_more_noise(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, round_: int) -> None:  # noqa: ARG001
        self.ledger = self.ledger.record(
            replace(
                self.training.release,
                noise_multiplier=10 * self.training.release.noise_multiplier,
            )
        )

    patch.setattr(Curator, "_charge", wrong)


def shaped_noise(shape: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        normals = Coins.normals
        patch.setattr(Coins, "normals", lambda self, count: shape(normals(self, count)))

    return apply


def one_silent_coordinate(n: Any) -> Any:
    n[7] = 0.0
    return n


def reused_every_second_round(patch: pytest.MonkeyPatch) -> None:
    same = "flwr_ppsgd.server.curator.coins_for"
    patch.setattr(same, lambda _, purpose, round_: Coins.insecure(round_ % 2, purpose))


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "noise / 1.1": (scaled_noise(1 / 1.1), "noise multiplier"),
    "noise / 4": (scaled_noise(1 / 4), "noise multiplier"),
    "missing clip": (missing_clip, "gain"),
    "division by the number received": (divided_by_the_number_received, "gain"),
    "reused noise": (reused_noise, "between rounds"),
    "one scalar for all coordinates": (one_scalar_for_all, "between coordinates"),
    "no noise on an empty round": (nothing_on_empty_rounds, "empty rounds"),
    "uncharged rounds": (uncharged_rounds, "the ledger holds"),
    "charged for more noise": (charged_for_more_noise, "the ledger holds"),
    "coin flips": (shaped_noise(np.sign), "kurtosis"),
    "uniform noise": (shaped_noise(lambda n: math.sqrt(12) * ((n * 1e6) % 1 - 0.5)), "kurtosis"),
    "the second half repeats the first": (
        shaped_noise(lambda n: np.tile(n[: len(n) // 2], 2)),
        "two halves",
    ),
    "antithetic halves": (
        shaped_noise(lambda n: np.append(n[: len(n) // 2], -n[: len(n) // 2])),
        "two halves",
    ),
    "one silent coordinate": (shaped_noise(one_silent_coordinate), "so little noise"),
    "noise reused every second round": (reused_every_second_round, "two rounds apart"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_mechanism_is_convicted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, finding = BROKEN[kind]
    break_it(monkeypatch)
    found = audited()
    assert found.verdict == "convicted"
    assert any(finding in line for line in found.findings), found.in_words()


def test_there_is_nothing_to_audit_without_a_release_or_noise() -> None:
    with pytest.raises(ValueError, match="nothing to audit"):
        audited(Release(Poisson(10, 1.0), 1.0, 0.0))
    with pytest.raises(ValueError, match="nothing to audit"):
        audit(lambda: PPSGD(release=HUNDRED, steps=Steps(0.0, 0.1), delta=1e-5), planned_rounds=5)


def test_other_ways_to_reply_are_audited_too() -> None:
    """Clients that return parameters, and private measures that take a share of the clip norm."""
    settings: dict[str, Any] = {
        "release": HUNDRED,
        "steps": Steps(0.3, 0.1),
        "delta": 1e-5,
        "insecure_seed": 3,
    }
    for more in ({"replies": "parameters"}, {"metrics": PrivateMetrics({"loss": 1.0}, share=0.3)}):
        found = audit(lambda more=more: PPSGD(**settings, **more), planned_rounds=5, size=SIZE)  # type: ignore[misc]
        assert found.verdict == "conforms", found.in_words()
    with pytest.raises(ValueError, match="without enrolled"):
        audit(lambda: PPSGD(**settings, enrolled=range(1, 101)), planned_rounds=5)


def test_standard_errors_are_honest() -> None:
    """Over 30 audits the estimates scatter as their standard errors say: χ² of 30 within 5
    standard deviations."""
    found = [audit(make(seed=seed), planned_rounds=5, size=1000, seed=seed) for seed in range(30)]
    for name in found[0].estimates:
        estimates: list[Estimate] = [a.estimates[name] for a in found]
        squares = [((e.value - e.expected) / e.error) ** 2 for e in estimates]
        assert abs(np.sum(squares) - 30) < 5 * math.sqrt(60)
