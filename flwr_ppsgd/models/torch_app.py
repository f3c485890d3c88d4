"""Make a ClientApp, a learner or the server's w from a torch app's network and loaders."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray
from torch import nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.client.app import client_app
from flwr_ppsgd.models.additive_linear import Loss
from flwr_ppsgd.models.torch_data import BatchKey, Loader, LoaderBatches
from flwr_ppsgd.models.torch_loss import BatchLoss, LossFunction
from flwr_ppsgd.models.torch_model import SplitModel
from flwr_ppsgd.models.torch_split import (
    Shapes,
    list_patterns,
    refuse_other_shared,
    split_parameters,
)
from flwr_ppsgd.models.torch_training import OptimizerFactory, PersonalTraining, SplitLearner
from flwr_ppsgd.recipe import Task

Loaders: TypeAlias = Callable[[Context], tuple[Loader, Loader | None]]
PARTITION = ("partition-id", "num-partitions")
PUBLIC_SEED = 0  # of a network's initial values: the same on every client


def torch_client(
    network: Callable[[], nn.Module],
    personal: str | Sequence[str],
    loaders: Loaders,
    *,
    additive: bool = False,
    loss: Loss | LossFunction = "softmax",
    inputs: BatchKey | Sequence[BatchKey] | None = None,
    target: BatchKey | None = None,
    device: str | torch.device | None = "auto",
    optimizer: OptimizerFactory | None = None,
    personal_steps: int = 1,
    weight_decay: float = 0.0,
    task: Task | None = None,
    local_step: float | None = None,
    local_steps: int | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """A ClientApp for a torch module and a node's training and test loaders.

    The network is made once here, without values, so that a wrong pattern fails now and not when
    messages arrive.

    Args:
        network: a module-level function or class that makes the module.
        personal: patterns of personal parameters, as for ``SplitModel``.
        loaders: a module-level function that returns a node's training loader and its test loader
            or None.
        additive, loss, device: as for ``SplitModel``.
        inputs, target, optimizer, personal_steps, weight_decay, task: as for
            ``torch_learner``.
        local_step, local_steps, mods: as for ``client_app``. Flower's clipping and local DP mods
            expect trained parameters in a reply, so they work with stock strategies only.
    """
    if isinstance(network, nn.Module):
        name = type(network).__name__
        raise ValueError(
            f"network is a {name}, and each client needs its own: give the class ({name}) or a "
            f"module-level function that makes one, not {name}()"
        )
    if not callable(network):
        raise ValueError(
            f"network must be a class or function that makes the module, got {network!r}: the "
            "order is torch_client(network, personal, loaders)"
        )
    patterns = tuple(list_patterns(personal))
    _shared_shapes(network, patterns, additive)
    BatchLoss(loss, torch.device("cpu"))
    PersonalTraining(optimizer, personal_steps, weight_decay)
    learner = functools.partial(
        torch_learner,
        additive=additive,
        loss=loss,
        inputs=inputs,
        target=target,
        device=device,
        optimizer=optimizer,
        personal_steps=personal_steps,
        weight_decay=weight_decay,
        task=task,
    )
    learner_for = _TorchLearnerFor(network, patterns, additive, loaders, learner)
    return client_app(learner_for, local_step=local_step, local_steps=local_steps, mods=mods)


@dataclass(frozen=True)
class _TorchLearnerFor:
    """A node's learner, made from its context."""

    network: Callable[[], nn.Module]
    personal: tuple[str, ...]
    additive: bool
    loaders: Loaders
    learner: Callable[..., SplitLearner]

    def __repr__(self) -> str:
        return f"torch_client(network={self.network!r}, loaders={self.loaders!r})"

    def check_shared(self, shapes: Shapes) -> None:
        """ValueError unless the server's arrays are the network's shared parameters."""
        here = _shared_shapes(self.network, self.personal, self.additive)
        refuse_other_shared(shapes, here, self.personal, self.additive)

    def __call__(self, context: Context) -> SplitLearner:
        train, test = self._loaders(context)
        user = int(context.node_config.get("partition-id", 0))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(PUBLIC_SEED)
            module = self.network()
        return self.learner(module, self.personal, train, test, user=user)

    def _loaders(self, context: Context) -> tuple[Loader, Loader | None]:
        try:
            made: Any = self.loaders(context)
        except KeyError as error:
            if error.args and error.args[0] in PARTITION:
                raise ValueError(
                    f"loaders asks for the node config's {error.args[0]!r}, and this node has "
                    f"{sorted(context.node_config)}: start its SuperNode with --node-config "
                    "'partition-id=0 num-partitions=10', or let loaders find this node's data "
                    "without it"
                ) from None
            raise
        if not isinstance(made, list | tuple) or len(made) != 2:
            raise ValueError(
                f"loaders returned a {type(made).__name__}, not two loaders: return (train, test), "
                "or (train, None)"
            )
        train, test = made
        return train, test


@functools.lru_cache(maxsize=8)
def _shared_shapes(
    network: Callable[[], nn.Module], personal: tuple[str, ...], additive: bool
) -> Shapes:
    """The shapes of the shared parameters; ValueError if the network cannot be split this way."""
    try:
        with torch.device("meta"):
            module = network()
    except Exception:  # not every network can be made without values
        module = network()
    shared, _ = split_parameters(module, personal, additive)
    parameters = dict(module.named_parameters())
    return {name: parameters[name].shape for name in shared}


def torch_learner(
    module: nn.Module,
    personal: str | Sequence[str],
    train: Loader,
    test: Loader | None = None,
    *,
    additive: bool = False,
    loss: Loss | LossFunction = "softmax",
    inputs: BatchKey | Sequence[BatchKey] | None = None,
    target: BatchKey | None = None,
    device: str | torch.device | None = "auto",
    optimizer: OptimizerFactory | None = None,
    personal_steps: int = 1,
    weight_decay: float = 0.0,
    task: Task | None = None,
    user: int = 0,
) -> SplitLearner:
    """A ``SplitModel`` of ``module`` with the rows of a user's loaders.

    Batches are (x, y), or mappings whose target has a usual name (label, labels, target, targets or
    y). Of a mapping, several inputs are passed by keyword; of a tuple, by position.

    Args:
        module: the network.
        personal, additive, loss, device: as for ``SplitModel``.
        train: the training loader; its batch size is the size of minibatches.
        test: the test loader, if there is one.
        inputs: the names, or in tuples the positions, of a batch's inputs; None: all but the
            target.
        target: the name or position of the target, if it has no usual name.
        optimizer: of θ: a class of ``torch.optim``, whose learning rate is then the server's s_θ,
            or a function of the parameters that makes one; None is θ − s_θ·g_θ. Also of
            local epochs under ``PPSGD.auto``, where None is Adam.
        personal_steps: the number of steps that θ takes in one visit.
        weight_decay: of θ.
        task: for ``PPSGD.auto``: "classification" or "regression"; by the loss unless given.
        user: decides the order of minibatches.
    """
    model = SplitModel(module, personal, loss, additive=additive, device=device)
    batches = LoaderBatches(train, inputs, target, user=user)
    test_batches = None
    if test is not None:
        test_batches = LoaderBatches(test, inputs, target, most_bytes=0, name="test")
    return model.learner(
        batches,
        test_batches,
        optimizer=optimizer,
        personal_steps=personal_steps,
        weight_decay=weight_decay,
        task=task,
    )


def shared_arrays(
    module: nn.Module, personal: str | Sequence[str], *, additive: bool = False
) -> ArrayRecord:
    """The part of a module that the server holds: everything that is not personal.

    Args:
        module: the network.
        personal, additive: as for ``SplitModel``; if additive, it is everything that is not frozen.
    """
    return SplitModel(module, personal, additive=additive).initial_arrays()


def whole_module(
    module: nn.Module,
    arrays: ArrayRecord | Sequence[NDArray[Any]],
    personal: str | Sequence[str],
    theta: Vector | None = None,
) -> nn.Module:
    """A copy of ``module`` that holds w, and a θ if there is one, in evaluation mode.

    It is for ``evaluate_fn``, and for saving: its ``state_dict`` is that of the whole module.
    Without θ the personal layers are those of w if θ is added to it, and else stay as they are in
    ``module``.

    Args:
        module: the network.
        arrays: w, as ``evaluate_fn`` gets it or as ``result.arrays``; in the legacy API a list.
        personal: as for ``SplitModel``.
        theta: one user's personal parameters, such as ``PersonalModel.load(…).theta``.
    """
    everything, _ = split_parameters(module, personal, additive=True)
    additive = len(arrays) == len(everything)
    return SplitModel(module, personal, additive=additive).module_with(arrays, theta)
