"""How many directions carry the energy of a set of vectors.

Source: SpectralQuant (Dynamis-Labs/spectralquant). Vectors count by direction alone, so neither
ratio nor gap depends on their scale.
"""

import mlx.core as mx
import numpy as np

from veloxquant.quantizers.spectral import eigenbasis


def _variances(vectors: np.ndarray) -> np.ndarray:
    """Falling variances (D,) of unit vectors along rows (N, D), float64."""
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or 0 in rows.shape or not np.isfinite(rows).all():
        raise ValueError(f"vectors of shape {rows.shape}; give finite (n, d) with n, d at least 1")
    # Into the range of fp32 first; directions are all that counts.
    rows = rows / max(float(np.abs(rows).max()), 1e-300)
    return eigenbasis(mx.array(rows.astype(np.float32))[None])[1][0].astype(np.float64)


def participation(variances: np.ndarray) -> float:
    """(Σλ)²/Σλ² of variances; 0 for zeros."""
    square = float(np.square(variances).sum())
    return float(variances.sum()) ** 2 / square if square > 0 else 0.0


def compute_participation_ratio(vectors: np.ndarray) -> float:
    """The number of directions that unit vectors along rows (n, d) spread over: (Σλ)²/Σλ².

    Raises:
        ValueError: for anything but a matrix of finite numbers.
    """
    return participation(_variances(vectors))


def compute_spectral_gap(vectors: np.ndarray) -> tuple[int, np.ndarray]:
    """The rounded participation ratio and the variances (d,), falling.

    Raises:
        ValueError: for anything but a matrix of finite numbers.
    """
    variances = _variances(vectors)
    return max(1, round(participation(variances))), variances
