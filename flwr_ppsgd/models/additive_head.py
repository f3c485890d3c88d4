"""Any network under an additive head, (w + θ_i)ᵀΦ_W(x)."""

import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.models.head import Additive, LinearHead
from flwr_ppsgd.models.linear import Loss
from flwr_ppsgd.models.losses import LossFunction
from flwr_ppsgd.models.split import SplitModel, flat_vector


class AdditiveHead(SplitModel):
    """(w + θ_i)ᵀΦ_W(x): any network as the shared representation Φ_W, under an additive head.

    The network's parameters and the head w are shared (and clipped together), θ_i is a head of the
    same size.

    Args:
        network: Φ_W.
        num_features: the number of outputs of ``network``.
        num_outputs: K.
        loss: as for ``SplitModel``.
        head: the initial w, a num_features × num_outputs tensor; None is zero.
        device: as for ``SplitModel``.
    """

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        num_outputs: int,
        loss: Loss | LossFunction = "softmax",
        head: Tensor | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        shape = (num_features, num_outputs)
        start = torch.zeros(shape) if head is None else head
        found = tuple(start.shape)
        if found != shape:
            raise ValueError(
                f"head must have shape {shape}, got {found}: give num_features × num_outputs"
            )
        additive = Additive(network, start)
        super().__init__(additive, personal=["personal"], loss=loss, device=device)

    @property
    def additive(self) -> bool:
        """θ is added to the shared head."""
        return True

    @property
    def is_head(self) -> bool:
        """Whether the network is frozen."""
        return self._shared == ["head"]

    def shared_head(self, w: Vector) -> Vector:
        """The shared head in w."""
        return flat_vector([self._split(w, self._shared, "w")["head"]])

    def head(self) -> LinearHead | None:
        """The head, on the outputs of the network."""
        features, outputs = self._parameters["personal"].shape
        return LinearHead("network", (features, outputs), transposed=False)
