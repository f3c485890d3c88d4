"""Split a module's parameters into shared ones, w, and personal ones, θ, or refuse to."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import nn
from torch.nn.parameter import UninitializedParameter

Shapes: TypeAlias = Mapping[str, Sequence[int]]

MOST_SUGGESTED = 3


def list_patterns(personal: str | Sequence[str]) -> list[str]:
    """One pattern or several as a list."""
    return [personal] if isinstance(personal, str) else list(personal)


def split_parameters(
    module: nn.Module, personal: str | Sequence[str], additive: bool = False
) -> tuple[list[str], list[str]]:
    """The names of the (shared, personal) parameters; with ``additive`` all are shared.

    ValueError if a pattern matches nothing, if one of the blocks is empty, or if the module cannot
    be split.
    """
    _refuse_running_statistics(module)
    patterns = list_patterns(personal)
    parameters = dict(module.named_parameters())
    tied = dict(module.named_parameters(remove_duplicate=False))  # by all of their names
    for pattern in patterns:
        if not fnmatch.filter(tied, pattern):
            near = difflib.get_close_matches(pattern, parameters, n=MOST_SUGGESTED, cutoff=0.0)
            raise ValueError(
                f"personal={patterns}: {pattern!r} matches no parameter of "
                f"{type(module).__name__}; the nearest are {near}: use one of those names, or a "
                "pattern such as 'head.*'"
            )
    _refuse_tied_across(tied, patterns)
    moving = [name for name, value in parameters.items() if value.requires_grad]
    own = [name for name in moving if _matches(name, patterns)]
    shared = [name for name in moving if additive or name not in own]
    for block, found in (("personal", own), ("shared", shared)):
        if not found:
            raise ValueError(
                f"personal={patterns} leaves no {block} parameter among {sorted(moving)}: name "
                "some of them, not none and not all"
            )
    return shared, own


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_tied_across(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> None:
    """ValueError if one tensor is personal by one of its names and shared by another."""
    names: dict[int, list[str]] = {}
    for name, value in parameters.items():
        names.setdefault(id(value), []).append(name)
    for tied in names.values():
        own = [name for name in tied if _matches(name, patterns)]
        others = [name for name in tied if name not in own]
        if own and others:
            raise ValueError(
                f"personal={list(patterns)}: {own[0]!r} and {others[0]!r} are one tensor (tied), "
                "and would be personal and shared at once: match both or none, or untie them"
            )


def _refuse_running_statistics(module: nn.Module) -> None:
    """ValueError if a normalisation keeps statistics of the data it has seen."""
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ValueError(
                f"{type(part).__name__} {name!r} tracks running statistics, which are neither "
                "shared nor personal parameters: use GroupNorm or LayerNorm, or "
                "track_running_stats=False"
            )


def refuse_without_values(module: nn.Module) -> None:
    """ValueError if a parameter has no values."""
    for name, value in module.named_parameters():
        if isinstance(value, UninitializedParameter) or value.is_meta:
            raise ValueError(
                f"parameter {name!r} has no values yet: load the network's weights, or call it "
                "once on a batch if it has lazy layers, before it is split"
            )


def refuse_other_shared(
    there: Shapes, here: Shapes, patterns: Sequence[str], additive: bool
) -> None:
    """ValueError unless a server's w has the shared parameters of this client, in their shapes.

    Numbers for names say nothing: legacy servers send them, and so do those that send w as one
    vector.

    Args:
        there: the shapes of the server's arrays, by name.
        here: those of this client's shared parameters.
        patterns: of this client's personal parameters, for the error.
        additive: likewise.
    """
    if all(name.isdigit() for name in there):
        return
    missing = sorted(set(here) - set(there))
    unknown = sorted(set(there) - set(here))
    if missing or unknown:
        raise ValueError(
            f"the server's w has {unknown or 'nothing'} that is not shared here, and lacks "
            f"{missing or 'nothing'} that is: personal={list(patterns)}, additive={additive} on "
            "this client must be those of shared_arrays(module, personal, additive=…) on the "
            "server; buffers, frozen parameters and further names of tied ones are no part of w"
        )
    for name, shape in there.items():
        if tuple(shape) != tuple(here[name]):
            raise ValueError(
                f"{name!r} has shape {tuple(shape)} in the server's w and {tuple(here[name])} in "
                "this client's network: make the network with the same sizes on both sides"
            )
