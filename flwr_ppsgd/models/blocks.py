"""Which parameters of a module are shared and which are personal, and what cannot be split."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

Shapes: TypeAlias = Mapping[str, Sequence[int]]
MOST_SUGGESTED = 3


def patterns_of(personal: str | Sequence[str]) -> list[str]:
    """Patterns as a list, a single one too."""
    return [personal] if isinstance(personal, str) else list(personal)


def blocks(
    module: nn.Module, personal: str | Sequence[str], additive: bool = False
) -> tuple[list[str], list[str]]:
    """The names of the (shared, personal) parameters; with ``additive`` all are shared.

    ValueError if a pattern matches nothing, or if one of the blocks is empty.
    """
    patterns = patterns_of(personal)
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in _all_names(module)):
            near = difflib.get_close_matches(pattern, parameters, n=MOST_SUGGESTED, cutoff=0.0)
            raise ValueError(
                f"personal={patterns}: {pattern!r} matches no parameter of "
                f"{type(module).__name__}; the nearest are {near}: use one of those names, or a "
                "pattern such as 'head.*'"
            )
    _refuse_tied_across(module, patterns)
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


def _all_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by all of their names: tied ones have several."""
    return dict(module.named_parameters(remove_duplicate=False))


def _refuse_tied_across(module: nn.Module, patterns: Sequence[str]) -> None:
    """ValueError if one tensor is personal by one of its names and shared by another."""
    names: dict[int, list[str]] = {}
    for name, value in _all_names(module).items():
        names.setdefault(id(value), []).append(name)
    for tied in names.values():
        own = [name for name in tied if _matches(name, patterns)]
        others = [name for name in tied if name not in own]
        if own and others:
            raise ValueError(
                f"personal={list(patterns)}: {own[0]!r} and {others[0]!r} are one tensor (tied), "
                "and would be personal and shared at once: match both or none, or untie them"
            )


def refuse_other_shared(there: Shapes, here: Shapes, split: str) -> None:
    """ValueError unless a server's w has the shared parameters of this client, in their shapes.

    Numbers for names say nothing: legacy servers send them, and so does whoever sends w as one
    vector.

    Args:
        there: the shapes of the server's arrays, by name.
        here: those of this client's shared parameters.
        split: how this client tells shared from personal parameters, for the error.
    """
    if all(name.isdigit() for name in there):
        return
    missing = sorted(set(here) - set(there))
    unknown = sorted(set(there) - set(here))
    if missing or unknown:
        raise ValueError(
            f"the server's w has {unknown or 'nothing'} that is not shared here, and lacks "
            f"{missing or 'nothing'} that is: {split} on this client must be those of "
            "shared_arrays(module, personal, additive=…) on the server; buffers, frozen "
            "parameters and further names of tied ones are no part of w"
        )
    for name, shape in there.items():
        if tuple(shape) != tuple(here[name]):
            raise ValueError(
                f"{name!r} has shape {tuple(shape)} in the server's w and {tuple(here[name])} in "
                "this client's network: make the network with the same sizes on both sides"
            )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def device_for(module: nn.Module, device: str | torch.device | None) -> torch.device:
    """Where to compute: as named, a GPU if there is one for "auto", or where the module is."""
    if device is None:
        return next(module.parameters()).device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f'device must be "auto" or a torch device, got {device!r}: such as "cpu" or "cuda:0"'
        ) from None
    if found.type == "meta":
        raise ValueError('device="meta" holds no values: use "auto" or "cpu"')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f'device={device!r}, but torch sees no GPU here: use device="auto" or "cpu"'
        )
    return found


def refuse_without_values(module: nn.Module) -> None:
    """ValueError if a parameter has no values, or no shape."""
    for name, value in module.named_parameters():
        if isinstance(value, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet: call the network once on a batch before it "
                "is split"
            )
        if value.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device and has no values: load the network's "
                'weights first (module.to_empty(device="cpu"), then load_state_dict)'
            )


def refuse_running_statistics(module: nn.Module) -> None:
    """ValueError if a normalisation keeps statistics of the data it has seen."""
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ValueError(
                f"{type(part).__name__} {name!r} tracks running statistics, which are neither "
                "shared nor personal parameters: use GroupNorm or LayerNorm, or "
                "track_running_stats=False"
            )


def allows_channels_last(module: nn.Module, beside: type[nn.Module]) -> bool:
    """Whether no code but torch's own sees the layout of tensors inside a module.

    Channels-last makes small convolutions twice as fast, but a ``view`` in somebody's ``forward``
    fails on it.

    Args:
        module: the network, with all its layers.
        beside: a class of ours that may be among them.
    """
    for part in module.modules():
        own = type(part) is beside
        torchs = type(part).__module__.startswith("torch.nn.modules.")
        hooks = part._forward_hooks or part._forward_pre_hooks
        if hooks or not (own or torchs):
            return False
    return True
