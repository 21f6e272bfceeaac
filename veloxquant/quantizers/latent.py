"""Rows as latents: projected on directions that were fitted to the first tokens of a store.

A row is a linear map of its latents, so products never unpack rows: queries are projected once, and
weighted sums of latents are turned into sums of rows once.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from veloxquant.kernels.native import MAX_DIM, PLAIN, NativeRun
from veloxquant.quantizers.affine import AffineChannelCodec
from veloxquant.quantizers.base import Packed, Shared, headroom
from veloxquant.quantizers.specs.affine import AffineChannelSpec
from veloxquant.quantizers.specs.latent import PROJECTED, ScheduledSpec
from veloxquant.quantizers.transform import Moments, sample_moments

MomentsOf = Callable[[mx.array], Moments]


def directions(covariance: np.ndarray) -> np.ndarray:
    """Eigenvectors of covariances (..., D, D) as columns, the strongest first; fp32."""
    spread = np.einsum("...ii->...i", covariance).max(axis=-1)[..., None, None]
    unit = (covariance / np.where(spread > 0, spread, 1.0)).astype(np.float32)
    # MLX's decomposition stays on one thread; numpy's waits on many for small matrices.
    _, vectors = mx.linalg.eigh(mx.array(unit), stream=mx.cpu)
    return np.array(vectors)[..., ::-1]


def basis_of(vectors: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Directions (..., D, r) as they are stored: they turn latents into rows.

    A latent is as large as its row is long, which is over 65504 for rows that fp16 holds; there
    directions are as much longer as latents are smaller.
    """
    wide = np.ascontiguousarray(vectors) * headroom(vectors.shape[-2], dtype)
    return mx.array(wide).astype(dtype)


def projecting(basis: mx.array) -> mx.array:
    """The fp32 directions that turn rows into latents for a stored basis (..., D, r)."""
    return basis.astype(mx.float32) / headroom(basis.shape[-2], basis.dtype) ** 2


def project(x: mx.array, basis: mx.array, rows: int = PROJECTED) -> mx.array:
    """Latents (B, H, n, r) of rows (B, H, n, D), in fp32.

    In products of `rows` rows: one product of all would round a row by how many come with it.
    """
    batch, heads, n, dim = x.shape
    missing = -n % rows
    x = x.astype(mx.float32)
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)])
    x = x.reshape(batch, heads, -1, rows, dim)
    wide = basis.astype(mx.float32)[:, :, None]
    out = x @ mx.broadcast_to(wide, (batch, heads, x.shape[2], *wide.shape[3:]))
    return out.reshape(batch, heads, -1, out.shape[-1])[:, :, :n]


class Directions:
    """The map between channels and latents along the columns of `basis` (B, H, D, r)."""

    def __init__(self, basis: mx.array) -> None:
        self.basis = basis

    def rotate_query(self, q: mx.array) -> mx.array:
        """Latents of queries."""
        return q @ self.basis.astype(q.dtype)

    def unrotate(self, x: mx.array) -> mx.array:
        """Rows of latents."""
        return x @ self.basis.astype(x.dtype).swapaxes(-1, -2)


class Centre:
    """The map between channels and a single one that is 1 for every token: `mean` (B, H, 1, D)."""

    def __init__(self, mean: mx.array) -> None:
        self.mean = mean

    def rotate_query(self, q: mx.array) -> mx.array:
        """Products with the mean, (B, H, M, 1)."""
        return q @ self.mean.astype(q.dtype).swapaxes(-1, -2)

    def unrotate(self, x: mx.array) -> mx.array:
        """The mean times how much weight the tokens have."""
        return x * self.mean.astype(x.dtype)


class ScheduledCodec(Shared):
    """`basis` (D, live), `mean` (1, D), and `w`, `s`, `b` of each width, numbered in front.

    The basis is that of `basis_of`. `moments` says what rows to expect, those of the first ones if
    it is left out.
    """

    def __init__(self, dim: int, spec: ScheduledSpec, moments: MomentsOf | None = None) -> None:
        self.dim, self.spec = dim, spec
        self.moments = moments or sample_moments
        self.parts: list[tuple[AffineChannelCodec, int, int]] = []
        place, self._columns = 0, []
        for bits, start, stop in spec.parts(dim):
            codec = AffineChannelCodec(stop - start, AffineChannelSpec(bits, spec.group))
            self.parts.append((codec, place, place + stop - start))
            self._columns += range(start, stop)
            place += stop - start
        self.axes = {
            f"{i}.{name}": axis
            for i, (codec, _, _) in enumerate(self.parts)
            for name, axis in codec.axes.items()
        }

    def fit(self, x: mx.array) -> Packed:
        """Directions and mean of every head for (B, H, fit_tokens, D); waits for the rows once."""
        found = self.moments(x)
        vectors = directions(found.covariance)[..., self._columns]
        return {
            "basis": basis_of(vectors, x.dtype),
            "mean": mx.array(found.mean.astype(np.float32)).astype(x.dtype),
        }

    def encode(self, x: mx.array) -> Packed:
        """Fit to these rows and pack them; a store keeps the constants instead."""
        fitted = self.fit(x)
        return {**self.encode_fitted(x, fitted), **fitted}

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D), n a multiple of the block."""
        centred = x.astype(mx.float32) - fitted["mean"].astype(mx.float32)
        basis = projecting(fitted["basis"])
        latents = project(centred, basis, self.spec.block).astype(x.dtype)
        return {
            f"{i}.{name}": a
            for i, (codec, start, stop) in enumerate(self.parts)
            for name, a in codec.encode(latents[..., start:stop]).items()
        }

    def _latents(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        parts = [codec.decode(_part(packed, i), dtype) for i, (codec, _, _) in self._numbered()]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _numbered(self) -> list[tuple[int, tuple[AffineChannelCodec, int, int]]]:
        return list(enumerate(self.parts))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        latents = self._latents(packed, mx.float32)
        return (Directions(packed["basis"]).unrotate(latents) + packed["mean"]).astype(dtype)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of projected queries with latents, and of queries with the mean."""
        latents = Directions(packed["basis"]).rotate_query(q)
        out = Centre(packed["mean"]).rotate_query(q)
        for i, (codec, start, stop) in self._numbered():
            out = out + codec.scores(latents[..., start:stop], _part(packed, i))
        return out

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums of latents as sums of rows; the mean counts as often as tokens do."""
        parts = [codec.mix(w, _part(packed, i)) for i, (codec, _, _) in self._numbered()]
        rows = Directions(packed["basis"]).unrotate(mx.concatenate(parts, axis=-1))
        return rows + w.sum(axis=-1, keepdims=True) * packed["mean"].astype(w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...] | None:
        """The widths one after the other, each in its own directions, and the mean."""
        runs = []
        for i, (codec, low, high) in self._numbered():
            if high - low > MAX_DIM:
                return None
            run = codec.native(_part(packed, i), start, stop)
            basis = Directions(packed["basis"][..., low:high])
            runs.append(run._replace(basis=basis, dim=high - low))
        return (*runs, centre_run(packed["mean"], runs[0]))


def centre_run(mean: mx.array, like: NativeRun) -> NativeRun:
    """A constant that adds the mean to the tokens of another run; `like` is per channel."""
    tokens = like.data.shape[3] * 32 // like.bits
    ones = mx.broadcast_to(mx.array(1.0), (*like.data.shape[:2], tokens, 1))
    return NativeRun(PLAIN, ones, like.start, like.stop, 1, basis=Centre(mean), dim=1)


def _part(packed: Packed, i: int) -> Packed:
    prefix = f"{i}."
    return {n.removeprefix(prefix): a for n, a in packed.items() if n.startswith(prefix)}
