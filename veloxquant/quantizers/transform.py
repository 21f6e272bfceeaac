"""Principal components, each at its own width: transform coding of one head.

A token is projected on the eigenvectors of its head's covariance; component i gets `bits[i]` bits
of a uniform grid over its spread. The codes of a token make one bit stream of fixed length, in
which every head lays its components out as it likes. A stream of bits is a row of 1-bit lanes, and
the row is a linear map of the lanes: `x ≈ origin + basis·(step·Σ 2^k·lane)`. So products read the
stream as 1-bit words, whatever the widths: the query is projected and spread over the lanes once.
Source: KVTC (arXiv 2511.01815). Differs: a basis for each layer and head, fitted to the first
tokens of the sequence, instead of one across layers and heads from a calibration set.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.allocators.kvtc_dp import dp_allocate_bits
from veloxquant.dsa.mlx_pack import pack
from veloxquant.kernels.native import AFFINE_TOKEN, MAX_DIM, PLAIN, NativeRun
from veloxquant.math.shrinkage import future_variances
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.few_rows import common_square, different_rows, unseen_share
from veloxquant.quantizers.specs.coded import PROJECTED, TransformSpec

STEPS = (0.0, 1.596, 0.996, 0.586, 0.335, 0.188, 0.1041, 0.0569, 0.0308)
"""Best uniform step for a unit Gaussian by width (Max 1960)."""
_RUN_WORDS = MAX_DIM // 32
_USED, _SPREAD = 8, 16


class Moments(NamedTuple):
    """Mean (B, H, 1, D) and covariance (B, H, D, D) in fp64.

    `rows` is the size of the sample that they are those of, None when they stand for all rows.
    `unseen` (B, H) says how much of the directions the sample leaves open, None for nothing.
    """

    mean: np.ndarray
    covariance: np.ndarray
    rows: int | None
    unseen: np.ndarray | None = None


def sample_moments(x: mx.array) -> Moments:
    """The moments of (B, H, n, D) itself."""
    unseen = unseen_share(different_rows(x), *x.shape[2:])
    rows = np.array(x.astype(mx.float32), dtype=np.float64)
    mean = rows.mean(axis=2, keepdims=True)
    centred = rows - mean
    covariance = centred.swapaxes(-1, -2) @ centred / rows.shape[2]
    return Moments(mean, covariance, rows.shape[2], unseen)


class TransformCodec(Shared):
    """`w` (B, H, T, words) uint32, and for each head: `basis` (D, R), `mean` and `origin` (1, D).

    Further `step` and `bits` (1, R) of the R components and `lane` (1, 32·words): component,
    place in it and use of every bit of the stream. `moments` says what rows to expect, those of
    the first ones if it is left out.
    """

    def __init__(
        self,
        dim: int,
        spec: TransformSpec,
        moments: Callable[[mx.array], Moments] | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        self.moments = moments or sample_moments
        self.axes = {"w": TokenAxis(2)}
        self.words, self.kept = spec.words(dim), spec.components(dim)
        self.lanes = 32 * self.words
        self.limits = {"lane": self.kept * _SPREAD, "bits": len(STEPS)}

    # ---- constants ----------------------------------------------------------------------

    def fit(self, x: mx.array) -> Packed:
        """Basis, grids and layout from (B, H, fit_tokens, D); waits for the rows once."""
        # A row of a broken step must not take the basis of all others with it.
        x = mx.where(mx.isfinite(x), x, mx.zeros((), x.dtype))
        mean, covariance, rows, unseen = self.moments(x)
        few = np.zeros(covariance.shape[:2], bool) if unseen is None else unseen > 0
        if unseen is not None and few.any():
            # A new row is about as long as the known ones, and lies anywhere.
            square = np.square(mean[:, :, 0]) + np.einsum("...ii->...i", covariance)
            spread = unseen[..., None] * (square + common_square(square))
            covariance = covariance + spread[..., None] * np.eye(self.dim)
        variances, vectors = _eigen(covariance)
        if rows is not None:
            variances = np.where(few[..., None], variances, future_variances(variances, rows - 1))
        bits = dp_allocate_bits(variances, self.spec.budget, self.spec.choices, self.spec.beta)
        bits = bits[..., : self.kept]
        step = np.asarray(STEPS)[bits] * np.sqrt(variances[..., : self.kept])
        step = mx.array(step[..., None, :].astype(np.float32))
        basis = mx.array(vectors[..., : self.kept].copy()).astype(x.dtype)
        # The mean lies between two levels; where it may be every first row, it shall be on one.
        top = ((1 << bits) - 1) / 2
        level = np.where(few[..., None], np.floor(top), top)
        level, aside = (mx.array(a[..., None, :].astype(np.float32)) for a in (level, top - level))
        across = basis.astype(mx.float32).swapaxes(-1, -2)
        mean = mx.array(mean.astype(np.float32))
        return {
            "basis": basis,
            "mean": mean + (aside * step) @ across,
            "origin": mean - (level * step) @ across,
            "step": step,
            "bits": mx.array(bits[..., None, :].astype(np.uint8)),
            "lane": mx.array(self._layout(bits)[..., None, :]),
        }

    def _layout(self, bits: np.ndarray) -> np.ndarray:
        """What each bit of the stream is, (..., lanes) uint16: component·16 + used·8 + place."""
        ends = np.cumsum(bits, axis=-1)
        lane = np.arange(self.lanes)
        component = (lane[..., :, None] >= ends[..., None, :]).sum(axis=-1)
        used = component < self.kept
        component = np.minimum(component, self.kept - 1)
        start = np.take_along_axis(ends - bits, component, axis=-1)
        out = component * _SPREAD + _USED + (lane - start)
        return np.where(used, out, 0).astype(np.uint16)

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Fit to these rows and pack them; a store keeps the constants instead."""
        fitted = self.fit(x)
        return {**self.encode_fitted(x, fitted), **fitted}

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D); a row is always at the same place of a block if ends of blocks are."""
        missing = -x.shape[2] % PROJECTED
        centred = x.astype(mx.float32) - fitted["mean"]
        if missing:
            centred = mx.pad(centred, [(0, 0), (0, 0), (missing, 0), (0, 0)])
        batch, heads, n, _ = centred.shape
        # Blocks of one size: a product of all rows would round a row by how many come with it.
        blocks = n // PROJECTED
        centred = centred.reshape(batch, heads, blocks, PROJECTED, self.dim)
        basis = fitted["basis"].astype(mx.float32)[:, :, None]
        z = centred @ mx.broadcast_to(basis, (batch, heads, blocks, *basis.shape[3:]))
        step, top = fitted["step"], _tops(fitted["bits"])
        place = z.reshape(batch, heads, n, self.kept) / mx.where(step > 0, step, 1.0)
        codes = mx.clip(mx.round(place + top / 2), 0, top)
        codes = mx.where(step > 0, codes, 0).astype(mx.uint8)
        component, shift, used = _lanes(fitted["lane"])
        spread = mx.take_along_axis(
            codes, mx.broadcast_to(component, (batch, heads, n, self.lanes)), axis=-1
        )
        lanes = (spread >> shift.astype(mx.uint8)) & used.astype(mx.uint8)
        return {"w": pack(lanes, 1)[:, :, missing:]}

    def _codes(self, packed: Packed) -> mx.array:
        """Codes (B, H, T, R) uint32 out of the stream."""
        bits = packed["bits"].astype(mx.uint32)
        start = mx.cumsum(bits, axis=-1) - bits
        word, shift = start >> 5, start & 31
        words = packed["w"]
        shape = (*words.shape[:3], self.kept)

        def picked(index: mx.array) -> mx.array:
            index = mx.minimum(index, self.words - 1)
            return mx.take_along_axis(words, mx.broadcast_to(index, shape), axis=-1)

        # A shift by 32 is not defined, hence in two steps.
        high = (picked(word + 1) << (31 - shift)) << 1
        return ((picked(word) >> shift) | high) & ((mx.array(1, dtype=mx.uint32) << bits) - 1)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        z = self._codes(packed).astype(mx.float32) * packed["step"]
        rows = z @ packed["basis"].astype(mx.float32).swapaxes(-1, -2)
        return (rows + packed["origin"]).astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of the spread query with the bits, and of the query with the origin."""
        spread = _Lanes(packed, 0, self.lanes).rotate_query(q)
        return self._bits_matmul(spread, packed, transpose=True) + q @ _origin(packed, q.dtype)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums of bits, gathered to components; the origin counts as often as tokens do."""
        sums = self._bits_matmul(w, packed, transpose=False)
        rows = _Lanes(packed, 0, self.lanes).unrotate(sums)
        return rows + w.sum(axis=-1, keepdims=True) * packed["origin"].astype(w.dtype)

    def _bits_matmul(self, x: mx.array, packed: Packed, *, transpose: bool) -> mx.array:
        group = next(size for size in (128, 64, 32) if self.lanes % size == 0)
        shape = (*packed["w"].shape[:3], self.lanes // group)
        one, zero = (mx.broadcast_to(mx.array(n, dtype=x.dtype), shape) for n in (1.0, 0.0))
        return mx.quantized_matmul(
            x, packed["w"], one, zero, transpose=transpose, group_size=group, bits=1
        )

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...]:
        """1-bit rows in the basis of the lanes, and a constant that stands for the origin."""
        batch, heads, tokens, _ = packed["w"].shape
        shape = (batch, heads, tokens, 1)
        one, zero = (mx.broadcast_to(mx.array(n), shape) for n in (1.0, 0.0))
        runs = []
        for low in range(0, self.words, _RUN_WORDS):
            high = min(low + _RUN_WORDS, self.words)
            width = 32 * (high - low)
            words = packed["w"] if width == self.lanes else packed["w"][..., low:high]
            run = NativeRun(
                AFFINE_TOKEN, words, start, stop, width, 1, width, scale=one, bias=zero,
                basis=_Lanes(packed, 32 * low, 32 * high), dim=width,
            )  # fmt: skip
            runs.append(run)
        constant = NativeRun(PLAIN, one, start, stop, 1, basis=_Origin(packed), dim=1)
        return (*runs, constant)


def _eigen(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (..., D), largest first, and eigenvectors as columns."""
    spread = np.einsum("...ii->...i", covariance).max(axis=-1)[..., None, None]
    unit = covariance / np.where(spread > 0, spread, 1.0)
    # MLX's decomposition stays on one thread; numpy's waits on many for small matrices.
    values, vectors = mx.linalg.eigh(mx.array(unit.astype(np.float32)), stream=mx.cpu)
    scaled = np.maximum(np.array(values, dtype=np.float64), 0.0) * spread[..., 0]
    return scaled[..., ::-1], np.array(vectors)[..., ::-1]


def _tops(bits: mx.array) -> mx.array:
    """Largest code of each component, fp32."""
    return mx.power(2.0, bits.astype(mx.float32)) - 1


def _lanes(lane: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Component, place in its code, and whether it is used, of every lane; uint32."""
    lane = lane.astype(mx.uint32)
    return lane // _SPREAD, lane & (_USED - 1), (lane // _USED) & 1


def _origin(packed: Packed, dtype: mx.Dtype) -> mx.array:
    return packed["origin"].astype(dtype).swapaxes(-1, -2)


class _Lanes:
    """The map between channels and lanes [low, high) of the stream."""

    def __init__(self, packed: Packed, low: int, high: int) -> None:
        self.packed, self.low, self.high = packed, low, high

    def rotate_query(self, q: mx.array) -> mx.array:
        """Project, scale, and repeat each component over its lanes."""
        p = self.packed
        z = (q @ p["basis"].astype(q.dtype)) * p["step"].astype(q.dtype)
        component, place, used = _lanes(p["lane"][..., self.low : self.high])
        shape = (*q.shape[:3], self.high - self.low)
        weight = mx.power(2.0, place.astype(mx.float32)) * used
        spread = mx.take_along_axis(z, mx.broadcast_to(component, shape), axis=-1)
        return spread * weight.astype(q.dtype)

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of lanes to sums of rows, without the origin."""
        p = self.packed
        bits = p["bits"].astype(mx.int32)
        start = mx.cumsum(bits, axis=-1) - bits - self.low
        sums = mx.zeros((), dtype=x.dtype)
        size = self.high - self.low
        for k in range(len(STEPS) - 1):
            lane = start + k
            inside = (k < bits) & (lane >= 0) & (lane < size)
            index = mx.broadcast_to(mx.clip(lane, 0, size - 1), (*x.shape[:3], lane.shape[-1]))
            part = mx.take_along_axis(x, index.astype(mx.uint32), axis=-1)
            sums = sums + part * mx.where(inside, float(1 << k), 0.0).astype(x.dtype)
        sums = sums * p["step"].astype(x.dtype)
        return sums @ p["basis"].astype(x.dtype).swapaxes(-1, -2)


class _Origin:
    """The map between channels and a single channel that is 1 for every token."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def rotate_query(self, q: mx.array) -> mx.array:
        """Products with the origin, (B, H, M, 1)."""
        return q @ _origin(self.packed, q.dtype)

    def unrotate(self, x: mx.array) -> mx.array:
        """The origin times how much weight the tokens have."""
        return x * self.packed["origin"].astype(x.dtype)
