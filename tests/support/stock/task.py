"""A network with convolutions and a ``view``, and batches that are dicts; no download."""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

Loader: TypeAlias = DataLoader[dict[str, Tensor]]
SIDE = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 2)
        self.fc1 = nn.Linear(6 * 2 * 2, 12)
        self.fc3 = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = x.view(-1, 6 * 2 * 2)
        out: Tensor = self.fc3(functional.relu(self.fc1(x)))
        return out


class Pictures(Dataset[dict[str, Tensor]]):
    """Noise, with one brighter colour: its number is the label."""

    def __init__(self, rows: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (rows,), generator=source)
        self.pictures = torch.randn(rows, 3, SIDE, SIDE, generator=source)
        self.pictures[torch.arange(rows), self.labels] += 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"img": self.pictures[row], "label": self.labels[row]}


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[Loader, Loader]:
    seed = partition_id % num_partitions
    train = DataLoader(Pictures(30, seed), batch_size=batch_size, shuffle=True)
    return train, DataLoader(Pictures(10, 1000 + seed), batch_size=batch_size)


def load_centralized_dataset() -> Loader:
    return DataLoader(Pictures(50, 5000), batch_size=25)


def train(net: nn.Module, trainloader: Loader, epochs: int, lr: float, device: Any) -> float:
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            optimizer.zero_grad()
            scores = net(batch["img"].to(device))
            loss = functional.cross_entropy(scores, batch["label"].to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
    return total


def test(net: nn.Module, testloader: Loader, device: Any) -> tuple[float, float]:
    net.to(device)
    losses = []
    right = 0
    with torch.no_grad():
        for batch in testloader:
            scores = net(batch["img"].to(device))
            losses.append(functional.cross_entropy(scores, batch["label"].to(device)).item())
            right += int((scores.argmax(dim=1) == batch["label"].to(device)).sum())
    return sum(losses) / len(losses), right / len(testloader.dataset)  # type: ignore[arg-type]


def get_weights(net: nn.Module) -> list[Any]:
    return [value.cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: nn.Module, parameters: list[Any]) -> None:
    pairs = zip(net.state_dict(), parameters, strict=True)
    net.load_state_dict({name: torch.tensor(value) for name, value in pairs}, strict=True)
