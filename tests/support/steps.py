"""A round of the algorithm in plain floating point."""

from collections.abc import Iterable

from flwr_ppsgd.algorithm import Release, Vector, clip, server_step


def noisy_step(
    w: Vector, sent: Iterable[Vector], release: Release, step: float, noise: Vector | float
) -> Vector:
    """w − s_w·(Σ_i clip(g_i, C) + noise) / D."""
    total: Vector | float = noise
    for gradient in sent:
        total = total + clip(gradient, release.clip_norm)
    return server_step(w, total, release, step)
