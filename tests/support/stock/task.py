"""What Flower's PyTorch quickstart keeps in task.py, on data that need no download."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return out


def load_data(
    partition_id: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    source = torch.Generator().manual_seed(partition_id % num_partitions)
    x = torch.randn(40, 8, generator=source)
    y = x[:, :3].argmax(dim=1)
    train, test = TensorDataset(x[:30], y[:30]), TensorDataset(x[30:], y[30:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(
        test, batch_size=batch_size
    )


def train(net: nn.Module, trainloader: DataLoader[Any], epochs: int, lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss = torch.tensor(0.0)
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return float(loss)


def test(net: nn.Module, testloader: DataLoader[Any]) -> tuple[float, float]:
    with torch.no_grad():
        scored = [(net(x), y) for x, y in testloader]
    scores, y = torch.cat([s for s, _ in scored]), torch.cat([y for _, y in scored])
    return float(nn.functional.cross_entropy(scores, y)), float(
        (scores.argmax(1) == y).float().mean()
    )
