"""Documented rotations and sketches: maps that turn vectors into a basis that quantizes well.

All take vectors (batch, d), or any leading axes, and give fp32.
Source: TurboQuant (arXiv 2504.19874), QuaRot (arXiv 2404.00456), QJL (arXiv 2406.03482).
"""

from typing import Any, Literal

import mlx.core as mx
import numpy as np

from veloxquant.artifacts import jl_matrix, rotation_matrix
from veloxquant.core.abstractions import ArtifactStore, Preconditioner
from veloxquant.core.constants import DEFAULT_SEED, SQRT_PI_OVER_2
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import PreconditionerRegistry
from veloxquant.math.rotation import is_hadamard_compatible, make_hadamard_diagonal

__path__ = []  # the documented submodules are names of this one: see veloxquant.documented
__all__ = [
    "HadamardPreconditioner",
    "JLSketchPreconditioner",
    "Preconditioner",
    "PreconditionerFactory",
    "QJLEncoder",
    "RotationPreconditioner",
]


def as_fp32(x: Any) -> mx.array:
    """An fp32 MLX array of an array of either library and any number type."""
    if not isinstance(x, mx.array):
        x = mx.array(np.asarray(x, dtype=np.float32))
    return x.astype(mx.float32)


def _matrix(value: Any, name: str) -> mx.array:
    matrix = as_fp32(value)
    if matrix.ndim != 2:
        raise QuantizerConfigError(f"{name} has shape {matrix.shape}; give a matrix")
    return matrix


@PreconditionerRegistry.register("rotation")
class RotationPreconditioner(Preconditioner):
    """Orthogonal matrix `Pi` (d, d): x @ Πᵀ and back."""

    def __init__(self, Pi: Any) -> None:
        self.matrix = _matrix(Pi, "Pi")
        if self.matrix.shape[0] != self.matrix.shape[1]:
            raise QuantizerConfigError(f"Pi has shape {self.matrix.shape}; give a square matrix")

    @property
    def dim(self) -> int:
        """Length of the vectors."""
        return self.matrix.shape[0]

    def apply(self, x: Any) -> mx.array:
        """Rotate vectors (..., d)."""
        return as_fp32(x) @ self.matrix.T

    def apply_inverse(self, y: Any) -> mx.array:
        """Rotate back."""
        return as_fp32(y) @ self.matrix


@PreconditionerRegistry.register("hadamard")
class HadamardPreconditioner(Preconditioner):
    """Randomized Hadamard rotation H·diag(D) with signs `D` (d,); nothing of size d² is stored."""

    def __init__(self, D: Any) -> None:
        self.signs = as_fp32(D).reshape(-1)
        if not is_hadamard_compatible(self.dim):
            raise QuantizerConfigError(
                f"no symmetric Hadamard matrix of size {self.dim} here; the size must be 2^k or "
                f"12·2^k. Use the preconditioner 'rotation' instead"
            )

    @property
    def dim(self) -> int:
        """Length of the vectors."""
        return self.signs.shape[0]

    def apply(self, x: Any) -> mx.array:
        """Flip signs, then transform."""
        return mx.hadamard_transform(as_fp32(x) * self.signs)

    def apply_inverse(self, y: Any) -> mx.array:
        """Transform, which is its own inverse, then flip signs back."""
        return mx.hadamard_transform(as_fp32(y)) * self.signs


@PreconditionerRegistry.register("jl")
class JLSketchPreconditioner(Preconditioner):
    """Sketch `S` (m, d): x @ Sᵀ to m numbers. The way back, y @ S, is no inverse.

    Inner products survive only on average: E[<Sx, Sy>] = m·<x, y> for Gaussian S.
    """

    def __init__(self, S: Any) -> None:
        self.matrix = _matrix(S, "S")

    @property
    def d(self) -> int:
        """Length of the vectors."""
        return self.matrix.shape[1]

    @property
    def m(self) -> int:
        """Length of the sketch."""
        return self.matrix.shape[0]

    def apply(self, x: Any) -> mx.array:
        """Sketch vectors (..., d) to (..., m)."""
        return as_fp32(x) @ self.matrix.T

    def apply_inverse(self, y: Any) -> mx.array:
        """Map sketches (..., m) to (..., d), biased."""
        return as_fp32(y) @ self.matrix


class QJLEncoder:
    """Signs of a sketch `S` (m, d) and the norm: inner products without bias, one bit a number."""

    def __init__(self, S: Any) -> None:
        self.sketch = JLSketchPreconditioner(S)

    @property
    def m(self) -> int:
        """Signs of each vector."""
        return self.sketch.m

    def encode_key(self, k: Any) -> tuple[mx.array, mx.array]:
        """Signs (batch, m) int8, +1 for zero, and norms (batch,) fp32 of keys (batch, d)."""
        k = as_fp32(k)
        signs = mx.where(self.sketch.apply(k) >= 0, 1, -1).astype(mx.int8)
        # Two steps, so that squares of large numbers stay finite.
        peak = mx.maximum(mx.abs(k).max(axis=-1), 1e-30)
        return signs, peak * mx.linalg.norm(k / peak[..., None], axis=-1)

    def estimate_ip(self, q: Any, signs: Any, norm: Any) -> mx.array:
        """Inner products (batch,) of a query (d,) or (1, d) with encoded keys."""
        query = self.sketch.apply(as_fp32(q).reshape(-1))
        return as_fp32(signs) @ query * as_fp32(norm) * (SQRT_PI_OVER_2 / self.m)

    def decode_key(self, signs: Any, norm: Any) -> mx.array:
        """Vectors (batch, d) whose average over sketches is the encoded one; far from it alone."""
        scale = as_fp32(norm)[..., None] * (SQRT_PI_OVER_2 / self.m)
        return self.sketch.apply_inverse(signs) * scale


class PreconditionerFactory:
    """Creates preconditioners by name."""

    @staticmethod
    def create(
        kind: Literal["rotation", "jl", "hadamard"],
        d: int,
        m: int | None = None,
        *,
        seed: int = DEFAULT_SEED,
        store: ArtifactStore | None = None,
        **kwargs: Any,
    ) -> Preconditioner:
        """A seeded preconditioner.

        Args:
            kind: "rotation" (Haar), "hadamard", or "jl" for a sketch.
            d: length of the vectors.
            m: length of the sketch, `d` by default; the others ignore it.
            seed: of the random numbers.
            store: where a rotation or a sketch may lie.
            **kwargs: passed to other registered kinds, together with `d`, `m`, `seed`, `store`.

        Raises:
            QuantizerConfigError: for sizes below 1, or one without a Hadamard matrix.
            KeyError: for an unknown kind.
        """
        width = d if m is None else m
        if d < 1 or width < 1:
            raise QuantizerConfigError(f"d={d!r} and m={m!r} must be at least 1")
        known = PreconditionerRegistry.get(kind)
        if kind == "rotation":
            return RotationPreconditioner(rotation_matrix(d, seed, store))
        if kind == "hadamard":
            return HadamardPreconditioner(make_hadamard_diagonal(d, seed))
        if kind == "jl":
            return JLSketchPreconditioner(jl_matrix(d, width, seed, store))
        return known(d=d, m=width, seed=seed, store=store, **kwargs)
