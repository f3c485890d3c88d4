"""The code in docs/solving.md runs as it stands."""

import re

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "solving.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_of_the_page_runs(code: str) -> None:
    exec(compile(code, "solving.md", "exec"), {})


def test_the_page_has_its_blocks() -> None:
    assert len(BLOCKS) == 2
