"""The documentation's code runs, in the order in which it stands."""

import re
import tomllib
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from flwr_ppsgd.client.policy import KEYS
from flwr_ppsgd.settings import Settings, keys_of
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
SECURE = (DOCS / "secure-aggregation.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_page_on_secure_aggregation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for code in blocks(SECURE, "python"):
        exec(code, names)
    printed = capsys.readouterr().out
    assert "the server and any 2 of the other users together" in printed
    assert names["strategy"].ledger.rounds == 3


def test_the_keys_on_the_page_are_read() -> None:
    flat, node = (tomllib.loads(text) for text in blocks(SECURE, "toml"))
    assert set(flat) <= set(keys_of(Settings))
    assert set(node) <= set(KEYS)


def test_the_picture_is_whole_and_knows_the_dark() -> None:
    text = (DOCS / "secure-aggregation.svg").read_text("utf-8")
    assert ET.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert "secure-aggregation.svg" in SECURE
