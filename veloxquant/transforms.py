"""Recursive polar coordinates: a vector as angles of a binary tree and the radii at its top.

Source: PolarQuant (arXiv 2502.02617).
"""

import math
from typing import Any

import mlx.core as mx

from veloxquant.core.abstractions import Transform
from veloxquant.core.constants import DEFAULT_POLAR_LEVELS
from veloxquant.core.context import TransformResult
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.preconditioners import as_fp32

__path__ = []  # the documented submodules are names of this one: see veloxquant.documented
__all__ = ["RecursivePolarTransform", "Transform"]


class RecursivePolarTransform(Transform):
    """`n_levels` rounds of polar coordinates of neighbouring pairs.

    The first level's angles lie in [0, 2π), the others, of pairs of radii, in [0, π/2].
    """

    def __init__(self, n_levels: int = DEFAULT_POLAR_LEVELS) -> None:
        if n_levels < 1:
            raise QuantizerConfigError(f"n_levels={n_levels!r}; there must be at least one level")
        self._n_levels = n_levels

    @property
    def n_levels(self) -> int:
        """Rounds of pairing."""
        return self._n_levels

    def forward(self, x: Any) -> TransformResult:
        """Angles (batch, d / 2^level) of each level and radii of vectors (batch, d).

        The radius is (batch,) when the levels go down to one, else (batch, d / 2^n_levels).

        Raises:
            QuantizerConfigError: when d is not a multiple of 2^n_levels.
        """
        radius = as_fp32(x)
        d = radius.shape[-1]
        if d % (1 << self.n_levels):
            raise QuantizerConfigError(
                f"vectors of length {d} cannot be halved {self.n_levels} times; use fewer levels "
                f"or a length that 2^{self.n_levels} divides"
            )
        angles = []
        for level in range(self.n_levels):
            first, second = radius[..., 0::2], radius[..., 1::2]
            angle = mx.arctan2(second, first)
            if level == 0:
                angle = mx.where(angle < 0, angle + 2 * math.pi, angle)
                # rounding up of a tiny negative angle gives 2π itself
                angle = mx.where(angle >= 2 * math.pi, 0.0, angle)
            else:
                angle = mx.where((first == 0) & (second == 0), math.pi / 4, angle)
            angles.append(angle)
            radius = _hypot(first, second)
        final = radius[..., 0] if radius.shape[-1] == 1 else radius
        return TransformResult(angles, final, self.n_levels)

    def inverse(self, result: TransformResult) -> mx.array:
        """Vectors (batch, d) fp32 from angles and radii."""
        radius = as_fp32(result.final_radius)
        if radius.ndim < as_fp32(result.angles[-1]).ndim:
            radius = radius[..., None]
        for angle in reversed(result.angles):
            angle = as_fp32(angle)
            pair = mx.stack([radius * mx.cos(angle), radius * mx.sin(angle)], axis=-1)
            radius = pair.reshape(*angle.shape[:-1], 2 * angle.shape[-1])
        return radius


def _hypot(a: mx.array, b: mx.array) -> mx.array:
    """sqrt(a² + b²) without overflow."""
    peak = mx.maximum(mx.maximum(mx.abs(a), mx.abs(b)), 1e-30)
    return peak * mx.sqrt(mx.square(a / peak) + mx.square(b / peak))
