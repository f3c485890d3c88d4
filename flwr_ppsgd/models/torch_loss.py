"""The loss of a network's predictions over minibatches, and the task and accuracy it implies."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction
from flwr_ppsgd.checks import one_of
from flwr_ppsgd.models.additive_linear import Loss
from flwr_ppsgd.recipe import Task

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]

HALF = (torch.bfloat16, torch.float16)
LOSSES_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


class BatchLoss:
    """The mean or the sum of a loss over the samples of a minibatch.

    A loss of torch that takes the mean is switched to one loss per sample. Any other loss that
    returns one number for several samples is called for each sample alone.

    Args:
        loss: "softmax" (cross-entropy, targets are class numbers), "squared" (½ of the squared
            error, summed over outputs), or an ``nn.Module`` or function (prediction, y) → loss.
        device: of the network.
    """

    def __init__(self, loss: Loss | LossFunction, device: torch.device) -> None:
        self._named = isinstance(loss, str)
        if isinstance(loss, str):
            one_of("loss", loss, LOSSES)
            self._loss = LOSSES[loss]
        elif isinstance(loss, nn.Module):
            own: Any = copy.deepcopy(loss).to(device)
            if getattr(own, "reduction", None) == "mean":
                own.reduction = "none"
            self._loss = own
        else:
            self._loss = loss

    def total(self, prediction: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
        """The mean or the sum of the samples' losses."""
        y = self._reshape_targets(prediction, y)
        samples = len(y)
        losses = self._call(prediction, y)
        if losses.ndim == 0:
            rows = [slice(row, row + 1) for row in range(samples)]
            losses = torch.stack([self._call(prediction[row], y[row]) for row in rows])
        if len(losses) != samples:
            raise ValueError(
                f"the loss returned {len(losses)} numbers for {samples} samples: return one for "
                'each sample (reduction="none")'
            )
        if losses.ndim > 1:
            losses = losses.flatten(1).mean(dim=1)
        return losses.mean() if reduction == "mean" else losses.sum()

    def task(self, y: Tensor) -> Task:
        """Regression for squared and absolute errors of one number per sample, else classes.

        Args:
            y: targets of some samples.
        """
        of_numbers = self._loss is _half_square or isinstance(self._loss, LOSSES_OF_NUMBERS)
        return "regression" if of_numbers and y.numel() == len(y) else "classification"

    def accuracy(self, prediction: Tensor, y: Tensor) -> float | None:
        """The share of samples that are right; None unless there are classes, or yes and no."""
        if self._loss is _half_square:
            return None
        if prediction.numel() == len(y) == y.numel():
            least = _least_yes(self._loss)
            if least is None:
                return None
            says_yes = prediction.reshape(-1) > least
            right = says_yes == (y.reshape(-1) > 0.5)
        elif prediction.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
            right = prediction.argmax(dim=1) == y
        else:
            return None
        return float(right.double().mean())

    def _call(self, prediction: Tensor, y: Tensor) -> Tensor:
        try:
            losses = self._loss(prediction, y)
        except IndexError as error:
            outputs = prediction.shape[-1]
            raise ValueError(
                f"{error} The network has {outputs} outputs, so class numbers go from 0 to "
                f"{outputs - 1}: give the network more outputs, or number the classes from 0"
            ) from None
        if not isinstance(losses, Tensor):
            raise ValueError(
                f"the loss returned a {type(losses).__name__}: return a tensor, one loss for each "
                "sample"
            )
        return losses

    def _reshape_targets(self, prediction: Tensor, y: Tensor) -> Tensor:
        """y in the shape of a network with one output, whose targets are often one-dimensional."""
        if len(prediction) != len(y):
            raise ValueError(
                f"the network returned {len(prediction)} predictions for {len(y)} targets: let "
                "forward return one row per sample"
            )
        one_output = prediction.ndim == 1 or prediction.shape[1:].numel() == 1
        if self._named or not one_output or y.numel() != prediction.numel():
            return y
        return y.reshape(prediction.shape).to(prediction.dtype)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    if prediction.ndim == 1 or prediction.shape[1] == 1:
        raise ValueError(
            f'loss="softmax" needs an output for each class, got predictions of shape '
            f'{tuple(prediction.shape)}: use loss="squared" for numbers, '
            "torch.nn.BCEWithLogitsLoss() for yes or no, or give the network more outputs"
        )
    if y.is_floating_point():
        raise ValueError(
            f'loss="softmax" needs class numbers, got targets of {y.dtype}: convert them to whole '
            'numbers (y.long()), or use loss="squared"'
        )
    scores = prediction.float() if prediction.dtype in HALF else prediction
    classes_second = scores.ndim == 2 or y.shape == scores[:, 0].shape
    if not classes_second and y.shape == scores.shape[:-1]:
        scores = scores.movedim(-1, 1)  # samples × places × classes, as text models have them
    return nn.functional.cross_entropy(scores, y.long(), reduction="none")


def _half_square(prediction: Tensor, y: Tensor) -> Tensor:
    if y.numel() != prediction.numel():
        raise ValueError(
            f"targets of shape {tuple(y.shape)} and predictions of shape "
            f'{tuple(prediction.shape)}: loss="squared" needs a number for each output; use '
            'loss="softmax" for class numbers'
        )
    if prediction.dtype in HALF:
        prediction = prediction.float()
    squares = (prediction - y.reshape(prediction.shape)) ** 2
    return 0.5 * squares.reshape(len(squares), -1).sum(dim=1)


LOSSES: Mapping[str, LossFunction] = {"softmax": _cross_entropy, "squared": _half_square}


def _least_yes(loss: LossFunction) -> float | None:
    """The prediction above which a yes-or-no loss of torch means yes; None for other losses."""
    functional = nn.functional
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return 0.0
    if loss is functional.binary_cross_entropy_with_logits:
        return 0.0
    if isinstance(loss, nn.BCELoss) or loss is functional.binary_cross_entropy:
        return 0.5
    return None
