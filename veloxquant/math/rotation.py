"""Random orthogonal maps: Haar matrices, randomized Hadamard, Gaussian sketches.

Everything random comes from `numpy.random.default_rng(seed)`, which is the same on every platform.
Source: QuaRot (arXiv 2404.00456) for Hadamard rotations of KV caches; QJL (arXiv 2406.03482).
"""

from functools import lru_cache

import numpy as np

# mlx multiplies by m * 2^k with these m; 20 and 28 are not symmetric, hence not self-inverse.
_ORDERS = (1, 12, 20, 28)
_SELF_INVERSE_ORDERS = (1, 12)


def _is_order(d: int, orders: tuple[int, ...]) -> bool:
    for m in orders:
        q, rest = divmod(d, m)
        if rest == 0 and q > 0 and q & (q - 1) == 0 and (m == 1 or q > 1):
            return True
    return False


def is_hadamard_compatible(d: int) -> bool:
    """Whether `d` is m·2^k with m in {1, 12}: transformed by MLX and self-inverse."""
    return d > 0 and _is_order(d, _SELF_INVERSE_ORDERS)


def hadamard_blocks(d: int) -> tuple[int, ...]:
    """Sizes, largest first, that sum to `d` and that MLX can each transform."""
    blocks: list[int] = []
    while d > 0:
        size = next(n for n in range(d, 0, -1) if _is_order(n, _ORDERS))
        blocks.append(size)
        d -= size
    return tuple(blocks)


def make_hadamard_diagonal(d: int, seed: int = 42) -> np.ndarray:
    """Random signs (d,) float32."""
    return np.random.default_rng(seed).choice(np.array([-1.0, 1.0], dtype=np.float32), size=d)


@lru_cache(maxsize=64)
def _haar(d: int, seed: int) -> np.ndarray:
    gaussian = np.random.default_rng(seed).standard_normal((d, d))
    q, r = np.linalg.qr(gaussian)
    out = q * np.sign(np.diag(r))
    out.flags.writeable = False
    return out


def make_rotation_matrix(d: int, seed: int = 42) -> np.ndarray:
    """Haar-random orthogonal matrix (d, d) float64; equal for equal seeds."""
    return _haar(d, seed).copy()


def make_jl_matrix(d: int, m: int, seed: int = 42) -> np.ndarray:
    """Independent standard normal entries (m, d) float64."""
    return np.random.default_rng(seed).standard_normal((m, d))
