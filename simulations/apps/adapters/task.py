"""Public pictures for the backbone, users' pictures for the adapter, and the networks."""

import functools
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Loader: TypeAlias = DataLoader[tuple[Tensor, ...]]

SIDE = 24
GLYPH = 8  # the side of a glyph, in pixels
PUBLIC_KINDS = 20
KINDS = 12  # of glyphs in users' pictures; the public ones are others
HABITS = 3  # kinds that one user has
PICTURES = 40  # per user; the last quarter is for testing
BATCH = 40
PUBLIC_STEPS = 150
PUBLIC_BATCH = 64
FEATURES = 32 * 4 * 4


class Backbone(nn.Module):
    """Features of a picture: two convolutions, as many published networks begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures × FEATURES, of length 1 each."""
        return nn.functional.normalize(self.layers(pictures), dim=1)


class Adapted(nn.Module):
    """The backbone's features, each times a factor that users share, under a personal head."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.adapter = nn.Parameter(torch.zeros(FEATURES))
        self.head = nn.Linear(FEATURES, KINDS)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        """Scores of the kinds."""
        features = self.backbone(pictures) * torch.exp(self.adapter)
        scores: Tensor = self.head(10.0 * nn.functional.normalize(features, dim=1))
        return scores


def adapted() -> Adapted:
    """The backbone is frozen: 512 factors are shared, the head is personal."""
    return Adapted(pretrained().requires_grad_(False))


def whole() -> Adapted:
    """The backbone is shared too: 5,568 parameters, and noise on each."""
    return Adapted(pretrained())


@functools.cache
def _public_weights() -> dict[str, Tensor]:
    """The backbone after some seconds on public glyphs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = Backbone()
        head = nn.Linear(FEATURES, PUBLIC_KINDS)
        optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=3e-3)
        source = torch.Generator().manual_seed(1)
        shapes = _shapes(PUBLIC_KINDS, seed=2)
        for _ in range(PUBLIC_STEPS):
            kinds = torch.randint(PUBLIC_KINDS, (PUBLIC_BATCH,), generator=source)
            pictures = _drawn(shapes[kinds], source, left=2, right=SIDE - GLYPH - 2)
            scores = head(10.0 * backbone(pictures))
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, kinds).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return backbone.state_dict()


def pretrained() -> Backbone:
    """The backbone as its publisher would ship it: no user's data went into it."""
    backbone = Backbone()
    backbone.load_state_dict(_public_weights())
    return backbone


@functools.cache
def load_data(user: int) -> tuple[Loader, Loader]:
    """A user's own pictures of a few kinds, for training and for testing.

    On the left of every picture is a stamp, which says nothing about the glyph on the right.
    """
    source = torch.Generator().manual_seed(100 + user)
    habits = torch.randperm(KINDS, generator=source)[:HABITS]
    kinds = habits[torch.randint(HABITS, (PICTURES,), generator=source)]
    glyphs = _shapes(KINDS, seed=3)[kinds]
    pictures = _drawn(glyphs, source, left=SIDE // 2 + 1, right=SIDE - GLYPH - 1)
    stamps = torch.randn(PICTURES, 1, SIDE, SIDE // 2, generator=source)
    pictures[:, :, :, : SIDE // 2] += 1.5 * stamps
    train = 3 * PICTURES // 4
    return (
        DataLoader(TensorDataset(pictures[:train], kinds[:train]), BATCH, shuffle=True),
        DataLoader(TensorDataset(pictures[train:], kinds[train:]), BATCH),
    )


def _shapes(count: int, seed: int) -> Tensor:
    """count × GLYPH × GLYPH: random strokes."""
    source = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 1, GLYPH // 2, GLYPH // 2, generator=source)
    smooth = nn.functional.interpolate(coarse, scale_factor=2, mode="nearest")
    return (smooth[:, 0] > 0).float()


def _drawn(shapes: Tensor, source: torch.Generator, left: int, right: int) -> Tensor:
    """Pictures × 1 × SIDE × SIDE: each glyph at a place of its own, in noise."""
    count = len(shapes)
    pictures = 0.3 * torch.randn(count, 1, SIDE, SIDE, generator=source)
    columns = torch.randint(left, right + 1, (count,), generator=source).tolist()
    rows = torch.randint(6, 11, (count,), generator=source).tolist()
    for picture, shape, row, column in zip(pictures, shapes, rows, columns, strict=True):
        picture[0, row : row + GLYPH, column : column + GLYPH] += shape
    return pictures
