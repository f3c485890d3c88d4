"""DataLoaders of an existing torch app as one user's learner."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flwr_ppsgd.client.message_api import client_app
from flwr_ppsgd.data.synthetic import Minibatches
from flwr_ppsgd.models.split import Loss, LossFunction, SplitLearner, SplitModel


def torch_client(
    network: Callable[[], nn.Module],
    personal: Sequence[str],
    loaders: Callable[[Context], tuple[Iterable[Any], Iterable[Any] | None]],
    *,
    loss: Loss | LossFunction = "softmax",
    local_step: float | None = None,
) -> ClientApp:
    """A ClientApp for a torch module and whatever function gives a node its training and test loaders.

    network, loaders: module-level functions or classes, as of ``client_app``. personal, loss: as of ``SplitModel``.
    """
    return client_app(functools.partial(_learner_for, network, personal, loaders, loss), local_step=local_step)


def _learner_for(
    network: Callable[[], nn.Module],
    personal: Sequence[str],
    loaders: Callable[[Context], tuple[Iterable[Any], Iterable[Any] | None]],
    loss: Loss | LossFunction,
    context: Context,
) -> SplitLearner:
    train, test = loaders(context)
    user = int(context.node_config.get("partition-id", 0))
    return torch_learner(network(), personal, train, test, loss=loss, user=user)


def torch_learner(
    module: nn.Module,
    personal: Sequence[str],
    train: Iterable[Any],
    test: Iterable[Any] | None = None,
    *,
    loss: Loss | LossFunction = "softmax",
    user: int = 0,
) -> SplitLearner:
    """A ``SplitModel`` of ``module`` with the rows of a user's loaders, in minibatches of the training loader's size.

    personal, loss: as of ``SplitModel``. user: decides the order of minibatches.
    """
    x, y = rows_of(train)
    size = getattr(train, "batch_size", None) or len(x)
    model = SplitModel(module, personal, loss)
    return model.learner(Minibatches(x, y, size, seed=0, user=user), None if test is None else rows_of(test))


def shared_arrays(module: nn.Module, personal: Sequence[str]) -> ArrayRecord:
    """What of a module the server holds: everything that is not personal."""
    return SplitModel(module, personal).initial_arrays()


def rows_of(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """All batches of a loader, each (x, y) or a mapping with those two in that order, in one."""
    pairs = [_pair(batch) for batch in loader]
    if not pairs:
        raise ValueError("a loader without a single batch: a user needs at least one row")
    xs, ys = zip(*pairs, strict=True)
    return torch.cat(xs), torch.cat(ys)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    if len(parts) != 2:
        raise ValueError(f"a batch of {len(parts)} parts where (x, y) was expected: build the learner from tensors")
    return parts[0], parts[1]
