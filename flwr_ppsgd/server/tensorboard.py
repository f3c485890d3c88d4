"""Curves for TensorBoard, if it is installed: what is public anyway, by round.

Nothing about clients is drawn.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("flwr.ppsgd")


class Scalars:
    """Writes to ``directory``; to nowhere if that is None or TensorBoard is missing."""

    def __init__(self, directory: Path | None) -> None:
        self._writer = None if directory is None else _writer(directory)

    def add(self, round_: int, values: Mapping[str, Any]) -> None:
        """The round's released values: ε, and private measures if there are any."""
        if self._writer is None:
            return
        for name, value in values.items():
            self._writer.add_scalar(f"ppsgd/{name}", value, round_)
        self._writer.flush()


def _writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        log.warning(
            "No curves in %s: TensorBoard is not installed (%s); pip install tensorboard",
            directory,
            error,
        )
        return None
    return SummaryWriter(str(directory))
