"""Any network under an additive head, (w + θ_i)ᵀΦ_W(x), for one user and for a whole cohort."""

import numpy as np
import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Reduction, Vector, clip_scales
from flwr_ppsgd.learner import Rows
from flwr_ppsgd.models.chain import PRECISIONS, Chain, product
from flwr_ppsgd.models.head import Additive, LinearHead
from flwr_ppsgd.models.linear import Loss, Matrix
from flwr_ppsgd.models.losses import LossFunction
from flwr_ppsgd.models.split import Floats, SplitModel, by_row, flat_vector

NETWORK = "network."  # how the names of the parameters under the head begin


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
        self._chain = self._known_layers()

    def _known_layers(self) -> Chain | None:
        """The network's layers, if a cohort can go through them together; else None."""
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        one_precision = len(dtypes) == 1 and self._dtype in PRECISIONS
        on_cpu = self._device.type == "cpu"
        if not one_precision or not on_cpu or not self._channels_last:
            return None
        trained = [name.removeprefix(NETWORK) for name in self._shared]
        return Chain.of(self._module.get_submodule("network"), trained)

    def entered(self, rows: tuple[Rows, Rows]) -> tuple[Tensor, Tensor]:
        """As of ``SplitModel``; x is one row after the other if the layers are known."""
        x, y = super().entered(rows)
        if self._chain is None:
            return x, y
        return self._chain.entered(x.flatten(0, 1)), y

    def cohort_gradients(
        self,
        ws: Matrix,
        thetas: Floats,
        entered: tuple[Tensor, Tensor],
        reduction: Reduction,
    ) -> tuple[Floats, Floats]:
        """As of ``SplitModel``. The gradient of the shared head is that of θ."""
        if self._chain is None:
            return super().cohort_gradients(ws, thetas, entered, reduction)
        gradients = self._by_user(ws, thetas, entered, reduction)
        g_theta = self._parts(gradients)["head"]
        return self._in_order(gradients), g_theta.double().numpy()

    def clipped_sums(
        self,
        ws: Matrix,
        thetas: Floats,
        entered: tuple[Tensor, Tensor],
        reduction: Reduction,
        clip_norms: Vector,
    ) -> tuple[Matrix, Floats]:
        """As of ``SplitModel``, with sums in the network's precision and norms in float64."""
        if self._chain is None:
            return super().clipped_sums(ws, thetas, entered, reduction, clip_norms)
        gradients = self._by_user(ws, thetas, entered, reduction)
        scales = clip_scales(_lengths(gradients), clip_norms[:, None])  # settings × users
        weights = torch.from_numpy(scales).to(gradients.dtype)
        sums = product(weights[:, None], gradients)[:, 0]
        g_theta = self._parts(gradients)["head"]
        return self._in_order(sums), g_theta.double().numpy()

    def _by_user(
        self,
        ws: Matrix,
        thetas: Floats,
        entered: tuple[Tensor, Tensor],
        reduction: Reduction,
    ) -> Tensor:
        """∇_w, settings × users × parameters, kernels in the order of the chain."""
        assert self._chain is not None
        x, y = entered
        network, heads = self._network_and_heads(ws, thetas)
        settings, users, width, _ = heads.shape
        way = self._chain.pass_for(x, settings, users)
        way.forward(x, network)
        features = way.features.view(settings, users, -1, width)
        slopes = self._slopes(product(features, heads), y, reduction)
        product(slopes, heads.transpose(2, 3), way.slope.view(features.shape))
        found = torch.empty(settings, users, ws.shape[1], dtype=self._dtype)
        parts = self._parts(found)
        product(features.transpose(2, 3), slopes, parts.pop("head").view(heads.shape))
        into = {name.removeprefix(NETWORK): part for name, part in parts.items()}
        way.backward(x, network, into)
        return found

    def _parts(self, gradients: Tensor) -> dict[str, Tensor]:
        """… × parameters as one view for each shared parameter."""
        sizes = [self._parameters[name].numel() for name in self._shared]
        return dict(zip(self._shared, torch.split(gradients, sizes, dim=-1), strict=True))

    def _in_order(self, gradients: Tensor) -> Floats:
        """The same with kernels in the order of w."""
        assert self._chain is not None
        parts = self._parts(gradients)
        head = parts.pop("head")
        network = {name.removeprefix(NETWORK): part for name, part in parts.items()}
        found = {NETWORK + name: part for name, part in self._chain.in_order(network).items()}
        found["head"] = head
        return by_row(found, self._shared, gradients.ndim - 1)

    def _network_and_heads(
        self,
        ws: Matrix,
        thetas: Floats,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The networks' parameters by name, and w + θ_i: settings × users × features × K."""
        shared = self._split(ws, self._shared, "w")
        personal = self._split(thetas, self._personal, "θ")
        heads = shared.pop("head")[:, None] + personal["personal"]
        return {name.removeprefix(NETWORK): part for name, part in shared.items()}, heads

    def _slopes(self, scores: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
        """The gradient of each user's loss in the own predictions: settings × users × m × K."""

        def objective(scores: Tensor, y: Tensor) -> Tensor:
            return self._objective.total(scores, y, reduction)

        by_user = scores.flatten(0, 1)
        targets = y.expand(len(scores), *y.shape).flatten(0, 1)
        if self._objective.by_sample:
            slopes = self._slopes_by_sample(by_user, targets, reduction)
        else:
            slopes = torch.func.vmap(torch.func.grad(objective))(by_user, targets)
        return slopes.view(scores.shape)

    def _slopes_by_sample(self, scores: Tensor, y: Tensor, reduction: Reduction) -> Tensor:
        """The same without ``vmap``, which takes milliseconds for a few numbers: rows of all users
        go into one sum, since the loss of a row has no other row in it."""
        leaf = scores.detach().requires_grad_()
        total = self._objective.total(leaf.flatten(0, 1), y.flatten(0, 1), "sum")
        (slopes,) = torch.autograd.grad(total, leaf)
        return slopes / scores.shape[1] if reduction == "mean" else slopes

    @property
    def additive(self) -> bool:
        """θ is added to the shared head."""
        return True

    def shared_head(self, w: Vector) -> Vector:
        """The shared head in w."""
        return flat_vector([self._split(w, self._shared, "w")["head"]])

    def local_start(self, w: Vector) -> Vector:
        """θ that takes the shared head away."""
        return -self.shared_head(w)

    def head(self) -> LinearHead | None:
        """θ itself, on the outputs of the network."""
        features, outputs = self._parameters["personal"].shape
        return LinearHead("network", (features, outputs), transposed=False)


def _lengths(gradients: Tensor) -> Matrix:
    """Norms along the last axis in float64, one row after the other: a row stays in a cache."""
    squares = []
    for row in gradients.flatten(0, 1).numpy():
        values = row.astype(np.float64)
        squares.append(values @ values)
    return np.sqrt(squares).reshape(gradients.shape[:2])
