"""Short texts of many users, one tag each, and the small network that reads them."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Whole: TypeAlias = NDArray[np.int64]
Loader: TypeAlias = DataLoader[dict[str, Tensor]]

VOCABULARY = 400  # words have the numbers from 1; 0 is padding
TAGS = 80
LONGEST = 24  # words of a text that are read
BATCH = 64
DIMENSIONS = 32

USERS = 150  # of the synthetic text, and all below
TEXTS = 40  # per user; the last quarter is for testing
TOPICS = 16
FILLERS = 80  # words that say nothing about a topic
FILLER_SHARE = 0.5  # of a text
HABITS = 3  # topics of one user


class TagNet(nn.Module):
    """Tags from the weighted mean of a text's word vectors.

    The word vectors are random and public, and stay as they are. Which words matter is the same for
    everyone, and shared: one number per word. What a word stands for is each user's own: the head.
    """

    def __init__(self) -> None:
        super().__init__()
        public = torch.Generator().manual_seed(0)
        vectors = torch.randn(VOCABULARY + 1, DIMENSIONS, generator=public)
        self.vectors = nn.Embedding(VOCABULARY + 1, DIMENSIONS, _weight=vectors)
        self.vectors.requires_grad_(False)
        self.adapter = nn.Embedding(VOCABULARY + 1, 1)
        self.head = nn.Linear(DIMENSIONS, TAGS)
        for parameter in (self.adapter.weight, self.head.weight, self.head.bias):
            nn.init.zeros_(parameter)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the tags; ``words`` is texts × word numbers."""
        known = (words > 0)[:, :, None]
        weight = torch.exp(self.adapter(words)) * known
        total = weight.sum(dim=1).clamp_min(1e-6)
        mean = (weight * self.vectors(words)).sum(dim=1) / total
        scores: Tensor = self.head(mean)
        return scores


@dataclass(frozen=True)
class Texts:
    """Texts of all users.

    Args:
        words: texts × LONGEST word numbers, padded with 0.
        tags: one for each text.
        user: whose text it is, from 0.
        test: whether it is for testing.
    """

    words: Whole
    tags: Whole
    user: Whole
    test: NDArray[np.bool_]

    @property
    def users(self) -> int:
        """How many there are."""
        return int(self.user.max()) + 1


@functools.cache
def texts(path: str) -> Texts:
    """The texts of a file in the form of zephyr_tags.npz; synthetic ones if there is no path."""
    return read(Path(path)) if path else synthetic()


def synthetic(users: int = USERS, seed: int = 0) -> Texts:
    """Public texts: mostly filler words, some words of one topic; a topic is a tag.

    Every user writes about a few topics, and calls them by tags of their own.
    """
    source = np.random.default_rng(seed)
    words = np.zeros((users, TEXTS, LONGEST), np.int64)
    tags = np.zeros((users, TEXTS), np.int64)
    topical = (VOCABULARY - FILLERS) // TOPICS  # words of one topic
    for user in range(users):
        habits = source.choice(TOPICS, HABITS, replace=False)
        own_tags = source.choice(TAGS, HABITS, replace=False)
        chosen = source.integers(HABITS, size=TEXTS)
        first = 1 + FILLERS + topical * habits[chosen][:, None]
        about = first + source.integers(topical, size=(TEXTS, LONGEST))
        fillers = source.integers(1, FILLERS + 1, size=(TEXTS, LONGEST))
        is_filler = source.random((TEXTS, LONGEST)) < FILLER_SHARE
        words[user] = np.where(is_filler, fillers, about)
        tags[user] = own_tags[chosen]
    user_of = np.repeat(np.arange(users), TEXTS)
    test = np.tile(np.arange(TEXTS) >= 3 * TEXTS // 4, users)
    return Texts(words.reshape(-1, LONGEST), tags.reshape(-1), user_of, test)


def read(path: Path) -> Texts:
    """A file of bags of words: ``user, test``, and CSR in ``indptr, indices`` and
    ``tag_indptr, tag_indices``. The first tag of a text counts, and the first words of the
    vocabulary."""
    with np.load(path) as file:
        columns = dict(file)
    ends = columns["indptr"]
    words = np.zeros((len(ends) - 1, LONGEST), np.int64)
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        found = columns["indices"][start:end]
        kept = found[found < VOCABULARY][:LONGEST]
        words[row, : len(kept)] = kept + 1
    first_tags = columns["tag_indices"][columns["tag_indptr"][:-1]]
    user = columns["user"].astype(np.int64)
    return Texts(words, first_tags.astype(np.int64), user, columns["test"])


class Rows(Dataset[dict[str, Tensor]]):
    """One user's texts, in batches with names."""

    def __init__(self, source: Texts, user: int, test: bool) -> None:
        own = (source.user == user) & (source.test == test)
        self.words = torch.from_numpy(source.words[own])
        self.tags = torch.from_numpy(source.tags[own])

    def __len__(self) -> int:
        return len(self.tags)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"words": self.words[row], "label": self.tags[row]}


@functools.cache
def load_data(path: str, user: int) -> tuple[Loader, Loader]:
    """A user's training and test texts."""
    source = texts(path)
    train, test = (Rows(source, user, part) for part in (False, True))
    return DataLoader(train, BATCH, shuffle=True), DataLoader(test, BATCH)
