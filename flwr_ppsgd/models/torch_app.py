"""DataLoaders of an existing torch app as one user's learner."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flwr_ppsgd.client.message_api import client_app
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.linear import Loss
from flwr_ppsgd.models.split import LossFunction, SplitLearner, SplitModel

Loader: TypeAlias = Iterable[Any]
Loaders: TypeAlias = Callable[[Context], tuple[Loader, Loader | None]]


def torch_client(
    network: Callable[[], nn.Module],
    personal: Sequence[str],
    loaders: Loaders,
    *,
    loss: Loss | LossFunction = "softmax",
    local_step: float | None = None,
) -> ClientApp:
    """A ClientApp for a torch module and a node's training and test loaders.

    Args:
        network: a module-level function or class that makes the module.
        personal: as for ``SplitModel``.
        loaders: a module-level function that returns a node's training loader and its test loader
            or None.
        loss: as for ``SplitModel``.
        local_step: as for ``client_app``.
    """
    learner_for = functools.partial(
        _learner_for,
        network,
        personal,
        loaders,
        loss,
    )
    return client_app(learner_for, local_step=local_step)


def _learner_for(
    network: Callable[[], nn.Module],
    personal: Sequence[str],
    loaders: Loaders,
    loss: Loss | LossFunction,
    context: Context,
) -> SplitLearner:
    train, test = loaders(context)
    user = int(context.node_config.get("partition-id", 0))
    return torch_learner(
        network(),
        personal,
        train,
        test,
        loss=loss,
        user=user,
    )


def torch_learner(
    module: nn.Module,
    personal: Sequence[str],
    train: Loader,
    test: Loader | None = None,
    *,
    loss: Loss | LossFunction = "softmax",
    user: int = 0,
) -> SplitLearner:
    """A ``SplitModel`` of ``module`` with the rows of a user's loaders.

    Args:
        module: the network.
        personal: as for ``SplitModel``.
        train: the training loader; its batch size is the size of minibatches.
        test: the test loader, if there is one.
        loss: as for ``SplitModel``.
        user: decides the order of minibatches.
    """
    x, y = rows_of(train)
    size = getattr(train, "batch_size", None) or len(x)
    batches = Minibatches(x, y, size, seed=0, user=user)
    model = SplitModel(module, personal, loss)
    if test is None:
        return model.learner(batches)
    return model.learner(batches, rows_of(test))


def shared_arrays(module: nn.Module, personal: Sequence[str]) -> ArrayRecord:
    """The part of a module that the server holds: everything that is not personal."""
    return SplitModel(module, personal).initial_arrays()


def rows_of(loader: Loader) -> tuple[Tensor, Tensor]:
    """All batches of a loader in one.

    Args:
        loader: batches that are (x, y), or a mapping with those two in that order.
    """
    pairs = [_pair(batch) for batch in loader]
    if not pairs:
        raise ValueError("a loader has no batch: a user needs at least one row")
    xs, ys = zip(*pairs, strict=True)
    return torch.cat(xs), torch.cat(ys)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    if len(parts) != 2:
        raise ValueError(
            f"a batch must be (x, y), got {len(parts)} parts: build the learner from tensors"
        )
    x, y = parts
    return x, y
