"""One number for each sample, from predictions and targets, by whichever loss a user has."""

import copy
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction
from flwr_ppsgd.checks import one_of
from flwr_ppsgd.models.linear import Loss
from flwr_ppsgd.recipe import Task

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Kind: TypeAlias = Literal["none", "mean", "sum"]

MOST_TRIED = 8  # samples by which a reducing loss is recognised
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
HALF_TOLERANCE = 2e-2
LOSSES_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


class Objective:
    """A loss as the algorithm needs it: the mean or the sum over the samples of a minibatch.

    A loss that reduces by itself (a scalar for several samples) is recognised by its value on a
    few samples: their mean, or their sum. One that is neither is refused.

    Args:
        loss: "softmax" (cross-entropy, targets are class numbers), "squared" (½ of the squared
            error, summed over outputs), or an ``nn.Module`` or function (prediction, y) → loss.
        device: of the network.
    """

    def __init__(self, loss: Loss | LossFunction, device: torch.device) -> None:
        self.counts_hits = loss != "squared"
        self._kind: Kind | None = None
        self._named = isinstance(loss, str)
        self._settled = self._named
        if isinstance(loss, str):
            one_of("loss", loss, LOSSES)
            self._loss = LOSSES[loss]
        elif isinstance(loss, nn.Module):
            self._loss = copy.deepcopy(loss).to(device)
        else:
            self._loss = loss

    def total(self, prediction: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
        """The mean or the sum of the samples' losses."""
        y = self._fitted(prediction, y)
        losses = self._call(prediction, y)
        count = len(y)
        if losses.ndim == 0:
            return self._rescaled(losses, prediction, y, reduction)
        if len(losses) != count:
            raise ValueError(
                f"the loss returned {len(losses)} numbers for {count} samples: return one for each "
                'sample (reduction="none")'
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

    def settle(self, first: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Find out how the loss reduces, before ``torch.func`` hides the values.

        Args:
            first: makes predictions and targets to try it on.
        """
        if not self._settled:
            self._settled = True
            self.total(*first(), "mean")

    def _rescaled(
        self, loss: Tensor, prediction: Tensor, y: Tensor, reduction: Reduction
    ) -> Tensor:
        count = len(y)
        if count == 1:
            return loss
        if self._kind is None:
            self._kind = self._recognised(prediction.detach(), y)
        if self._kind == reduction:
            return loss
        return loss * count if reduction == "sum" else loss / count

    def _recognised(self, prediction: Tensor, y: Tensor) -> Kind:
        """Whether a loss of several samples is their mean or their sum."""
        few = min(len(y), MOST_TRIED)
        with torch.no_grad():
            whole = self._loss(prediction[:few], y[:few]).double()
            single = [
                self._loss(prediction[place : place + 1], y[place : place + 1])
                for place in range(few)
            ]
        each = torch.stack(single).double()
        tolerance = TOLERANCE.get(prediction.dtype, HALF_TOLERANCE)
        is_mean = torch.isclose(whole, each.mean(), rtol=tolerance, atol=0.0)
        is_sum = torch.isclose(whole, each.sum(), rtol=tolerance, atol=0.0)
        if is_mean and is_sum:
            told = getattr(self._loss, "reduction", "mean")
            return "sum" if told == "sum" else "mean"
        if is_mean or is_sum:
            return "mean" if is_mean else "sum"
        raise ValueError(
            f"the loss returned {float(whole):.4g} for {few} samples, which is neither the mean "
            f"({float(each.mean()):.4g}) nor the sum ({float(each.sum()):.4g}) of their losses: "
            'use one with reduction="none", which returns a loss for each sample'
        )

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

    def _fitted(self, prediction: Tensor, y: Tensor) -> Tensor:
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
    _refuse_for_softmax(prediction, y)
    y = y.long()
    scores = prediction.float() if _is_half(prediction) else prediction
    if scores.ndim > 2 and y.shape != scores[:, 0].shape and y.shape == scores.shape[:-1]:
        scores = scores.movedim(-1, 1)  # samples × places × classes, as text models have them
    return nn.functional.cross_entropy(scores, y, reduction="none")


def _refuse_for_softmax(prediction: Tensor, y: Tensor) -> None:
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


def _half_square(prediction: Tensor, y: Tensor) -> Tensor:
    if y.numel() != prediction.numel():
        raise ValueError(
            f"targets of shape {tuple(y.shape)} and predictions of shape "
            f'{tuple(prediction.shape)}: loss="squared" needs a number for each output; use '
            'loss="softmax" for class numbers'
        )
    if _is_half(prediction):
        prediction = prediction.float()
    squares = (prediction - y.reshape(prediction.shape)) ** 2
    return 0.5 * squares.reshape(len(squares), -1).sum(dim=1)


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


LOSSES: Mapping[str, LossFunction] = {"softmax": _cross_entropy, "squared": _half_square}
