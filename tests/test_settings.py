"""Flat settings: the same keys, defaults and errors for whoever reads them."""

import math
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import PPSGD, FixedSize, Ledger, Poisson, Release, SecureSum, Steps
from flwr_ppsgd.lab.experiment import Experiment, experiment_keys
from flwr_ppsgd.settings import (
    NODE_KEYS,
    RUN_KEYS,
    Settings,
    check_run_config,
    key_of,
    override,
    read_toml,
    typed_value,
)
from tests.support.paths import ROOT

COHORT = {"population": 20, "rate": 1.0}
NOISE = {"clip-norm": 2.0, "noise-multiplier": 3.0, "delta": 1e-5}
FLAT: dict[str, Any] = {**COHORT, **NOISE, "step": 0.5, "alpha-q": 0.3, "rounds": 10}
MAY_BE_UNSET = {"cohort-size", "epsilon", "total-batch", "max-epsilon", "insecure-seed"}


def read(changes: dict[str, Any] | None = None, without: tuple[str, ...] = ()) -> Settings:
    flat = {**FLAT, **(changes or {})}
    return Settings.read(
        {key: value for key, value in flat.items() if key not in without}, where="here.toml"
    )


def test_flat_keys_become_the_values_of_the_core() -> None:
    settings = read()
    assert settings.release() == Release(Poisson(20, 1.0), clip_norm=2.0, noise_multiplier=3.0)
    assert settings.steps() == Steps.from_ratio(0.5, 0.3)
    assert (settings.delta, settings.rounds, settings.max_epsilon) == (1e-5, 10, None)
    assert read({"alpha-q": math.inf}).steps() == Steps(shared=0.5, personal=0.0)
    fixed = read({"cohort-size": 5, "total-batch": 200}, without=("rate",))
    assert fixed.release() == Release(FixedSize(20, 5), 2.0, 3.0, total_batch=200)


def test_what_is_written_reads_back_and_unset_values_are_not_written() -> None:
    """TOML and Flower's run config have no null."""
    settings = read({"max-epsilon": 4.0, "insecure-seed": 1})
    assert Settings.read(settings.to_flat(), where="again") == settings
    flat = read().to_flat()
    assert flat.items() >= FLAT.items()
    assert not flat.keys() & MAY_BE_UNSET
    assert None not in flat.values()


NEAREST = {"clipnorm": "clip-norm", "noise": "noise-multiplier", "alpha": "alpha-q"}
NEAREST["round"] = "rounds"


@pytest.mark.parametrize("key", NEAREST)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str) -> None:
    words = f"here.toml: unknown key '{key}': did you mean '{NEAREST[key]}'"
    with pytest.raises(ValueError, match=words):
        read({key: 1})


@pytest.mark.parametrize("key", sorted(FLAT.keys() - {"rate", "noise-multiplier", "rounds"}))
def test_a_missing_key_is_named(key: str) -> None:
    """In particular δ: a guarantee has no default."""
    with pytest.raises(ValueError, match=f"here.toml: '{key}' is missing"):
        read(without=(key,))


def test_privacy_has_no_defaults() -> None:
    """Neither noise nor δ nor a seed is ever made up."""
    defaults = {field.name: field.default for field in fields(Settings)}
    assert defaults["delta"] is MISSING
    for name in ("noise_multiplier", "epsilon", "insecure_seed"):
        assert defaults[name] is None


WRONG_TYPES: dict[str, list[tuple[str, object]]] = {
    "int": [("population", 20.0), ("population", True), ("rounds", "10"), ("insecure-seed", 1.5)],
    "float": [("clip-norm", "2"), ("clip-norm", [2.0]), ("rate", False), ("max-epsilon", "none")],
}


@pytest.mark.parametrize("wanted", WRONG_TYPES)
def test_a_wrong_type_is_refused_and_never_converted(wanted: str) -> None:
    for key, value in WRONG_TYPES[wanted]:
        words = re.escape(f"here.toml: {key} must be of type {wanted}, got {value!r}")
        with pytest.raises(ValueError, match=f"^{words}$"):
            read({key: value})


def test_a_whole_number_may_stand_for_a_float() -> None:
    settings = read({"clip-norm": 2, "rate": 1})
    assert (type(settings.clip_norm), type(settings.rate)) == (float, float)
    assert settings == read()


@pytest.mark.parametrize(
    ("one", "other"), [("rate", "cohort-size"), ("noise-multiplier", "epsilon")]
)
def test_exactly_one_of_two_ways_must_be_given(one: str, other: str) -> None:
    words = f"here.toml: give either {one} or {other}"
    with pytest.raises(ValueError, match=f"{words}: neither is set"):
        read(without=(one,))
    with pytest.raises(ValueError, match=f"{words}: both are set"):
        read({other: 1})


@pytest.mark.parametrize("cohort", [{"rate": 1.0}, {"rate": 0.2}, {"cohort-size": 5}])
def test_epsilon_calibrates_the_noise_for_the_planned_rounds(cohort: dict[str, Any]) -> None:
    """ε after ``rounds`` rounds is at most ``epsilon``, and a thousandth less noise would be too
    little."""
    settings = read(
        {**cohort, "epsilon": 2.0}, without=("noise-multiplier", *({"rate"} - cohort.keys()))
    )
    release = settings.release()
    less = replace(release, noise_multiplier=release.noise_multiplier * 0.999)
    assert (
        Ledger(1e-5).record(release, 10).epsilon() <= 2.0 < Ledger(1e-5).record(less, 10).epsilon()
    )


OUT_OF_RANGE: dict[str, tuple[str, list[float]]] = {
    "rounds": ("rounds must be at least 1, got {}", [0, -1]),
    "clip-norm": ("clip-norm must be positive and finite", [10**400]),
    "delta": (r"delta must be .* \(0, 0.1\), got {}", [0.0, 1.0, math.nan]),
    "epsilon": ("epsilon must be positive.*, got {}", [0.0, -1.0, math.nan]),
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range_is_named_before_any_noise_is_calibrated(key: str) -> None:
    words, values = OUT_OF_RANGE[key]
    for value in values:
        with pytest.raises(ValueError, match=f"here.toml: {words.format(value)}"):
            read({"epsilon": 1.0, key: value}, without=("noise-multiplier",))


def test_an_infinite_epsilon_gives_no_noise_to_calibrate() -> None:
    with pytest.raises(ValueError, match=r"epsilon must be positive.*, got inf"):
        read({"epsilon": math.inf}, without=("noise-multiplier",)).release()


SECURE = {"secure-honest": 15, "secure-colluding": 2}


def test_secure_keys_make_the_sum_a_secure_one() -> None:
    assert read(SECURE).release().aggregation == SecureSum(15, 2)
    training = read({**SECURE, "secure-failure": 1e-9, "secure-neighbours": 50})
    assert training.release().aggregation == SecureSum(15, 2, 1e-9, 50)
    assert Settings.read(training.to_flat(), "here") == training
    assert read().release().aggregation is None


def test_epsilon_is_calibrated_for_a_secure_sum_without_amplification() -> None:
    calibrated = {"epsilon": 2.0, "rate": 0.9, **SECURE}
    secure = read(calibrated, without=("noise-multiplier",)).release()
    everyone = read({"epsilon": 2.0}, without=("noise-multiplier",)).release()
    assert secure.noise_multiplier == everyone.noise_multiplier


@pytest.mark.parametrize("key", sorted(SECURE))
def test_half_of_a_secure_sum_is_refused(key: str) -> None:
    (other,) = SECURE.keys() - {key}
    with pytest.raises(ValueError, match=f"'{other}' is missing"):
        read({key: SECURE[key]})


def test_a_change_to_one_of_two_alternatives_takes_the_other_one_out() -> None:
    flat = {"rate": 1.0, "noise-multiplier": 3.0, "step": 0.1}
    assert override(flat, {"epsilon": 2.0}) == {"rate": 1.0, "step": 0.1, "epsilon": 2.0}
    drawn = override(flat, {"cohort_size": 2})
    assert drawn == {"noise-multiplier": 3.0, "step": 0.1, "cohort_size": 2}
    assert override(flat, {"rate": 0.5, "cohort-size": 2})["rate"] == 0.5


RUN_CONFIG: dict[str, object] = {**FLAT, "rate": 0.1, "lr": 0.01, "local-epochs": 3}


def test_a_strategy_from_a_run_config_that_holds_other_keys_too() -> None:
    ppsgd = PPSGD.from_config({**RUN_CONFIG, "max-epsilon": 4.0, "evaluate-every": 5})
    assert ppsgd.release == Release(Poisson(20, 0.1), 2.0, 3.0)
    assert ppsgd.steps == Steps.from_ratio(0.5, 0.3)
    assert (ppsgd.ledger.delta, ppsgd.training.evaluate_every) == (1e-5, 5)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"ppsgd-rat": 1}, "unknown key 'ppsgd-rat'"),
    ({"rate": 7.0}, "rate must be in"),
    ({"noise-multiplier": math.nan}, "run config: noise-multiplier must be"),
    ({"epsilon": 1.0}, "give either noise-multiplier or epsilon: both are set"),
    ({"replies": "weights"}, "'gradient' or 'parameters'"),
    ({"alpha-q": -1.0}, "alpha-q must be in"),
]


@pytest.mark.parametrize(("change", "line"), REFUSED)
def test_run_configs_get_the_errors_of_the_constructors(
    change: dict[str, object], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        PPSGD.from_config({**RUN_CONFIG, **change})


MEANT = {"max-epsilo": "max-epsilon", "enroled": "enrolled", "checkpoint-di": "checkpoint-dir"}
MEANT |= {"clip_nrom": "clip-norm", "ppsgd-runs": "ppsgd-run", "local-stepp": "local-step"}


@pytest.mark.parametrize("key", MEANT)
def test_a_misspelt_key_of_a_run_config_is_refused(key: str) -> None:
    """A budget with a letter missing would be no budget."""
    words = f"unknown key '{key_of(key)}': did you mean '{MEANT[key]}"
    with pytest.raises(ValueError, match=words):
        Settings.from_run_config({**RUN_CONFIG, key: 1})


def test_a_run_config_may_hold_every_key_that_is_read_anywhere() -> None:
    """None of them is taken for a misspelt one of another part."""
    known = [*experiment_keys(), *RUN_KEYS, *NODE_KEYS]
    check_run_config(dict.fromkeys(known), experiment_keys())
    others = {key: 1 for key in known if key_of(key) not in Settings.read(FLAT, "").to_flat()}
    given = MAY_BE_UNSET | {"personal", "full-batch", "adaptive-clip"}
    for key in [key for key in others if key in given or "secure" in key]:
        del others[key]
    Settings.from_run_config({**RUN_CONFIG, **others})


@pytest.mark.parametrize("key", ["stp", "rat", "lr", "data-set", "num-server-rounds", "user"])
def test_keys_of_the_app_itself_are_left_alone(key: str) -> None:
    """Short ones, too, which are one letter away from too much."""
    assert Settings.from_run_config({**RUN_CONFIG, key: 1}).population == 20


def test_an_experiment_refuses_misspelt_keys_of_its_own() -> None:
    with pytest.raises(ValueError, match="unknown key 'batch-siz': did you mean 'batch-size'"):
        Experiment.from_run_config({**RUN_CONFIG, "batch-siz": 3})


APPS = sorted((ROOT.parent / "shared" / "apps").glob("*/pyproject.toml"))


@pytest.mark.skipif(not APPS, reason="Flower's own quickstarts are looked for in ../shared/apps")
@pytest.mark.parametrize("path", APPS, ids=lambda path: path.parent.name)
def test_the_run_configs_of_flowers_quickstarts_are_accepted(path: Path) -> None:
    config = read_toml(path)["tool"]["flwr"]["app"]["config"]
    assert Settings.from_run_config({**config, **RUN_CONFIG}).rounds == 10


def test_numbers_of_numpy_are_numbers() -> None:
    for value, hint, wanted in (
        (np.int64(3), int, 3),
        (np.int32(3), float, 3.0),
        (np.float32(0.5), float, 0.5),
        (np.float64(0.5), float | None, 0.5),
    ):
        found = typed_value("key", value, hint)
        assert (found, type(found)) == (wanted, type(wanted))
    for other in (np.float64(3.0), np.bool_(True)):
        with pytest.raises(ValueError, match="key must be of type int, got"):
            typed_value("key", other, int)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "there.toml"
    with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be read: ")):
        read_toml(path)
    path.write_text("a = ")
    with pytest.raises(ValueError, match=r"there\.toml: cannot be read: .*: look elsewhere"):
        read_toml(path, remedy="look elsewhere")
