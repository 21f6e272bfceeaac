"""The binary tree of polar angles: which radii meet at which node, and the levels of their angle.

After a random rotation the radius of a coordinates and that of b others are chi distributed, so the
angle between them has the density cos^(a-1) sin^(b-1) on [0, π/2], which narrows around its middle
as a and b grow. At each level the first half of the radii meets the second. Sizes that are not
powers of two leave a radius over at some levels; it meets its sibling one level up.
Source: PolarQuant (arXiv 2502.02617).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from veloxquant.math.lloyd_max import lloyd_max

_SWEEPS = {1: 2000, 2: 2000, 3: 2000, 4: 1000}
"""Lloyd sweeps by bits; wider tables start close enough that 200 do."""


@dataclass(frozen=True)
class TreeLevel:
    """Pairs of one level: coordinates under both sides of each; whether a radius is left over."""

    sizes: tuple[tuple[int, int], ...]
    carries: bool


def tree(dim: int) -> tuple[TreeLevel, ...]:
    """Levels of the tree over `dim` coordinates, from the leaves to the root; `dim` is even."""
    assert dim % 2 == 0, dim
    sizes, levels = [1] * dim, []
    while len(sizes) > 1:
        half = len(sizes) // 2
        pairs = tuple(zip(sizes[:half], sizes[half : 2 * half], strict=True))
        carries = len(sizes) % 2 == 1
        levels.append(TreeLevel(pairs, carries))
        sizes = [a + b for a, b in pairs] + ([sizes[-1]] if carries else [])
    return tuple(levels)


def angle_density(angle: np.ndarray, a: int, b: int) -> np.ndarray:
    """Density, up to a factor, of the angle between radii of `a` and of `b` coordinates."""
    inside = np.clip(angle, 1e-12, math.pi / 2 - 1e-12)
    peak = math.atan2(math.sqrt(b), math.sqrt(a))
    log = (a - 1) * np.log(np.cos(inside) / math.cos(peak))
    return np.exp(log + (b - 1) * np.log(np.sin(inside) / math.sin(peak)))


@lru_cache(maxsize=256)
def angle_levels(a: int, b: int, bits: int) -> np.ndarray:
    """The 2^bits Lloyd–Max levels of that angle, ascending."""
    levels, _ = lloyd_max(
        lambda t: angle_density(t, a, b), (0.0, math.pi / 2), 1 << bits,
        n_iter=_SWEEPS.get(bits, 200), tol=1e-8,
    )  # fmt: skip
    levels.flags.writeable = False
    return levels
