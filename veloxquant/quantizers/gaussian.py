"""Codebooks of short Gaussian vectors: what vectors follow once they are rotated and normalised.

Two kinds. *Signed* tables are centroids of N(0, I). *Magnitude* tables are centroids of |N(0, I)|;
with a sign bit for each coordinate they make a table 2^d times as large that is closed under
changes of sign: its nearest centroid is found among the magnitudes alone, and with 64 rows for each
centroid it is no worse than a free table (4 coordinates in 12 bits: error 0.0266 a coordinate,
trained freely 0.0285). The tables of the default settings ship with the package, so that codes
written on one machine mean the same on another; others are trained when first used.
Source: NSNQuant (arXiv 2505.18231), section on the universal codebook.
"""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from veloxquant.math.kmeans import kmeans

Kind = Literal["signed", "magnitude"]
SEED = 1234
N_SAMPLES = 1 << 18
ITERS = 25
_SHIPPED = Path(__file__).parents[1] / "data" / "gaussian_codebooks.npz"
SHIPPED_SIZE = 256
SHIPPED_SUBS: dict[Kind, tuple[int, ...]] = {"signed": (8,), "magnitude": (4, 8)}
_LEAST_SIGNED_BITS = 9
"""Total bits from which a table is made of signs and magnitudes."""


def train(size: int, sub: int, seed: int, n_samples: int, iters: int, kind: Kind) -> np.ndarray:
    """Centroids (size, sub) float32 of `n_samples` Gaussian vectors, or of their magnitudes."""
    x = np.random.default_rng(seed).standard_normal((n_samples, sub)).astype(np.float32)
    return kmeans(np.abs(x) if kind == "magnitude" else x, size, iters, seed)[0]


@lru_cache(maxsize=64)
def gaussian_centroids(
    size: int,
    sub: int,
    seed: int = SEED,
    n_samples: int = N_SAMPLES,
    iters: int = ITERS,
    kind: Kind = "signed",
) -> np.ndarray:
    """Centroids (size, sub) float32, read-only: shipped ones for the default arguments."""
    table = None
    if (seed, n_samples, iters) == (SEED, N_SAMPLES, ITERS):
        with np.load(_SHIPPED, allow_pickle=False) as shipped:
            name = f"{kind}_{sub}_{size}"
            table = shipped.get(name)
    if table is None:
        table = train(size, sub, seed, n_samples, iters, kind)
    table = np.ascontiguousarray(table, dtype=np.float32)
    table.flags.writeable = False
    return table


def sign_bits(sub: int, bits: int) -> int:
    """How many of the `bits` of a code are signs in the table for these sizes: `sub` or none."""
    return sub if bits >= max(sub, _LEAST_SIGNED_BITS) else 0


def with_signs(magnitudes: np.ndarray) -> np.ndarray:
    """The table (2^d·K, d) of signed magnitudes (K, d); high bits of a code are signs, 1 = +."""
    size, sub = magnitudes.shape
    signs = (np.arange(1 << sub)[:, None] >> np.arange(sub)) & 1
    full = magnitudes[None] * (2 * signs - 1)[:, None].astype(np.float32)
    return full.reshape((1 << sub) * size, sub)


def centroids(size: int, sub: int, kind: Kind, seed: int = SEED) -> np.ndarray:
    """As `gaussian_centroids`, with as many samples as a table of this size needs."""
    if seed == SEED and size == SHIPPED_SIZE and sub in SHIPPED_SUBS[kind]:
        return gaussian_centroids(size, sub, kind=kind)
    samples = max(1 << 15, min(N_SAMPLES, 64 * size))
    return gaussian_centroids(size, sub, seed, samples, kind=kind)
