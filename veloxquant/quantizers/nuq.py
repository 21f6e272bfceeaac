"""Unequally spaced levels on normalised entries, outliers exact: the format of kvquant.

Keys are normalised channel by channel with ranges that the table fixes, values token by token in
groups of channels; one table of levels serves a head. Ranges are those of the inliers; the largest
entries of a token, measured by its ranges, are stored as differences in slots of the token.
Source: KVQuant (arXiv 2401.18079), sections 3.1 to 3.5. Differs: levels and ranges are fitted to
the first tokens of each head, and outliers counted by token, so that rows can be cut anywhere.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from veloxquant.dsa.mlx_pack import pack
from veloxquant.kernels.native import PLAIN, SPARSE, VECTOR, Basis, NativeRun
from veloxquant.quantizers.base import NativeParts, Packed, Shared, TokenAxis, saturated
from veloxquant.quantizers.few_rows import with_unlike_rows
from veloxquant.quantizers.fitted import for_batch
from veloxquant.quantizers.levels import book_of, codes_of, lloyd_levels, looked_up, nearest
from veloxquant.quantizers.run_bases import Constant, Groups, Piece, Scaled
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.sparse import corrected, largest, mark, missed
from veloxquant.quantizers.specs.grouped import index_bytes
from veloxquant.quantizers.specs.nuq import NuqChannelSpec, NuqSpec, NuqTokenSpec

_TILE = 1024
_LOUD = 2.0
"""Times the usual distance from the median beyond which a token is loud."""
_LEAST = 0.5
"""Share of the median range that every channel has."""
_TINY = 1e-30


def _ratio(x: mx.array, unit: mx.array) -> mx.array:
    """How many units `x` is, 0 where the unit is 0."""
    return mx.where(unit > 0, x / mx.maximum(unit, _TINY), 0.0)


def _floored(unit: mx.array) -> mx.array:
    """Units of channels (..., D), none far below the others, whom the sample may have hidden.

    Only their proportions matter, so they are all one where nothing was seen.
    """
    middle = mx.sort(unit, axis=-1)[..., unit.shape[-1] // 2, None]
    mean = unit.mean(axis=-1, keepdims=True)
    least = _LEAST * mx.where(middle > 0, middle, mean)
    return mx.where(mean > 0, mx.maximum(unit, least), 1.0)


def _even(dim: int) -> mx.array:
    """What the entries of a row without any are taken for when levels are fitted: (D,)."""
    return mx.linspace(-1.0, 1.0, dim)


def _median(x: mx.array) -> mx.array:
    """Upper median over the tokens of (B, H, tables, N, D), with the axis kept."""
    half = x.shape[3] // 2
    return mx.sort(x, axis=3)[:, :, :, half : half + 1]


def _span(x: mx.array, out: mx.array, middle: mx.array, axis: int) -> tuple[mx.array, mx.array]:
    """Middle and half of the range of the entries that are not `out`, along an axis that stays."""
    low = mx.where(out, mx.inf, x).min(axis=axis, keepdims=True)
    high = mx.where(out, -mx.inf, x).max(axis=axis, keepdims=True)
    some = low <= high
    return mx.where(some, high / 2 + low / 2, middle), mx.where(some, high / 2 - low / 2, 0.0)


class _NuqCodec(Shared):
    """What keys and values share; rows are seen as (B, H, tables, tokens of a table, D).

    `w` (B, H, T, words), slots `v` (B, H, T, slots) and their channels `i`; of each table `levels`
    (B, H, tables, 2^bits) fp32. One table is a constant of the store, more lie along its tokens.
    `given` are such constants of one sequence, (1, H, 1, ...), to take instead of fitted ones.
    """

    def __init__(self, dim: int, spec: NuqSpec, given: Packed | None = None) -> None:
        self.dim, self.spec, self.given = dim, spec, given or {}
        self.lanes, self.count = spec.lanes(dim), spec.slots(dim)
        self._index = mx.uint8 if index_bytes(dim) == 1 else mx.uint16
        names = ("w", "v", "i") if self.count else ("w",)
        self.axes = {name: TokenAxis(2) for name in names}
        self.limits = {"i": dim} if self.count else {}
        if spec.refit:
            self.axes |= {name: TokenAxis(2, 1, spec.refit) for name in self.constants}

    constants: tuple[str, ...] = ("levels",)

    # ---- what differs -------------------------------------------------------------------

    def _learn(self, x: mx.array, dtype: mx.Dtype) -> Packed:
        """Constants of fp32 rows (B, H, tables, N, D)."""
        raise NotImplementedError

    def _normal(self, x: mx.array, fitted: Packed, dtype: mx.Dtype) -> tuple[Any, ...]:
        """Middles and half ranges that go with fp32 rows, and arrays to store of them."""
        raise NotImplementedError

    def _scaled(self, t: mx.array, packed: Packed, tables: int) -> mx.array:
        """Levels (B, H, tables, N, lanes) times their ranges: (B, H, tables, N, D)."""
        raise NotImplementedError

    # ---- coding -------------------------------------------------------------------------

    def _wide(self, a: mx.array, tables: int) -> mx.array:
        batch, heads, n, *rest = a.shape
        return a.reshape(batch, heads, tables, n // tables, *rest)

    def fit(self, x: mx.array) -> Packed:
        """The table for rows (B, H, n, D)."""
        if self.given:
            ranges = {name: a.astype(x.dtype) for name, a in self.given.items() if name != "levels"}
            return for_batch({**ranges, "levels": self.given["levels"]}, x.shape[0])
        return self._learn(x.astype(mx.float32)[:, :, None], x.dtype)

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the block, each with a table of its own."""
        wide = self._wide(x.astype(mx.float32), x.shape[2] // self.spec.block)
        fitted = self._learn(wide, x.dtype)
        return {**self._coded(wide, fitted, x.dtype), **fitted}

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D) with the table of the store; every token alone."""
        return self._coded(x.astype(mx.float32)[:, :, None], fitted, x.dtype)

    def _coded(self, x: mx.array, fitted: Packed, dtype: mx.Dtype) -> Packed:
        batch, heads, tables, n, _ = x.shape
        middle, half, kept = self._normal(x, fitted, dtype)
        levels = fitted["levels"][..., None, :]
        codes = nearest(_ratio(x - middle, half), levels)
        missing = self.lanes - self.dim
        words = pack(
            mx.pad(codes, [(0, 0)] * 4 + [(0, missing)]) if missing else codes, self.spec.bits
        )
        out: Packed = {"w": words}
        if self.count:
            coded = looked_up(codes, levels) * half + middle
            at = largest(mx.abs(x - middle) / mx.maximum(half, _TINY), self.count)
            out |= {"v": missed(x, coded, at, dtype), "i": at.astype(self._index)}
        return {k: a.reshape(batch, heads, tables * n, -1) for k, a in (out | kept).items()}

    def _rows(self, packed: Packed) -> mx.array:
        """Rows (B, H, T, D) in fp32."""
        batch, heads, n, _ = packed["w"].shape
        tables = packed["levels"].shape[2]
        codes = codes_of(packed["w"], self.spec.bits, self.lanes)
        levels = packed["levels"][..., None, :]
        rows = self._scaled(looked_up(self._wide(codes, tables), levels), packed, tables)
        rows = rows.reshape(batch, heads, n, self.dim)
        return corrected(rows, packed["i"], packed["v"]) if self.count else rows

    def _tiles(self, packed: Packed) -> list[tuple[int, Packed]]:
        """Ranges of tokens whose unpacked rows stay in cache: their number and their arrays."""
        n, step = packed["w"].shape[2], round_up(_TILE, self.spec.block)
        out = []
        for start in range(0, n, step):
            stop = min(start + step, n)
            cut = {k: packed[k][:, :, p.at(start) : p.at(stop)] for k, p in self.axes.items()}
            out.append((stop - start, {**packed, **cut}))
        return out

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ, unpacked tile by tile."""
        out = [q @ self.decode(t, q.dtype).swapaxes(-1, -2) for _, t in self._tiles(packed)]
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V, unpacked tile by tile."""
        out, start = mx.zeros((), dtype=w.dtype), 0
        for n, tile in self._tiles(packed):
            out = out + w[..., start : start + n] @ self.decode(tile, w.dtype)
            start += n
        return out

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts | None:
        """Runs of codes as entries of a book, what is added to them, and the slots.

        The kernel reads one table, not one for each block.
        """
        if self.spec.refit:
            return None
        parts = self._native_codes(packed, start, stop, book_of(packed["levels"], self.spec.bits))
        if self.count:
            parts.append(NativeRun(SPARSE, packed["i"], start, stop, self.count, scale=packed["v"]))
        return tuple(parts)

    def _native_codes(
        self, packed: Packed, start: int, stop: int, book: mx.array
    ) -> list[NativeRun]:
        """Coded rows without their slots."""
        raise NotImplementedError

    def _entries(
        self, words: mx.array, start: int, stop: int, width: int, book: mx.array, basis: Basis,
        scale: mx.array | None = None,
    ) -> NativeRun:  # fmt: skip
        run = book.shape[-1]
        return NativeRun(
            VECTOR, words, start, stop, width, self.spec.bits * run, run,
            scale=scale, basis=basis, book=book, dim=min(width, self.dim),
        )  # fmt: skip

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        return self._rows(packed).astype(dtype)


class NuqChannelCodec(_NuqCodec):
    """Keys: `off` and `rng` (B, H, tables, D), middle and half range of each channel.

    `s` (B, H, T, 1) is how many of these ranges a token reaches. `seen` turns the first rows into
    those that the only table should suit.
    """

    spec: NuqChannelSpec
    constants = ("off", "rng", "levels")

    def __init__(
        self, dim: int, spec: NuqChannelSpec, given: Packed | None = None,
        seen: Callable[[mx.array], mx.array] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, spec, given)
        self.axes |= {"s": TokenAxis(2)}
        self.seen = seen

    def fit(self, x: mx.array) -> Packed:
        """The table for rows (B, H, n, D), fitted to what `seen` makes of them."""
        if self.given:
            return super().fit(x)
        rows = x.astype(mx.float32)
        rows = with_unlike_rows(mx.where(mx.isfinite(rows), rows, 0.0))
        if self.seen is not None:
            rows = self.seen(rows).astype(mx.float32)
        return self._learn(rows[:, :, None], x.dtype)

    def _learn(self, x: mx.array, dtype: mx.Dtype) -> Packed:
        x, middle = self._tame(x)
        away = mx.abs(x - middle)
        # Medians, because one huge entry must not make the others of its channel look small.
        out = mark(_ratio(away, _median(away)), self.count)
        off, rng = _span(x, out, middle, 3)
        off, rng = saturated(off, dtype), saturated(_floored(rng), dtype)
        t = _ratio(x - off.astype(mx.float32), rng.astype(mx.float32))
        reach = self._reach(t, dtype).astype(mx.float32)
        t = mx.where(reach > 0, mx.where(out, 0.0, _ratio(t, reach)), _even(self.dim))
        levels = lloyd_levels(t.reshape(*x.shape[:3], -1), self.spec.bits, self.spec.sweeps)
        return {"off": off.squeeze(3), "rng": rng.squeeze(3), "levels": levels}

    def _tame(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Rows whose distance from the median is at most twice the usual one, and that median.

        Every token has a factor when it is coded: a loud one shall not set the ranges.
        """
        x = mx.where(mx.isfinite(x), x, 0.0)
        middle = _median(x)
        away = mx.abs(x - middle)
        loud = self._reach(_ratio(away, _floored(_median(away))), mx.float32)
        most = _LOUD * mx.sort(loud, axis=3)[:, :, :, loud.shape[3] // 2, None]
        return middle + (x - middle) * mx.where(loud > most, _ratio(most, loud), 1.0), middle

    def _normal(self, x: mx.array, fitted: Packed, dtype: mx.Dtype) -> tuple[Any, ...]:
        off, rng = (fitted[k].astype(mx.float32)[..., None, :] for k in ("off", "rng"))
        reach = self._reach(_ratio(x - off, rng), dtype)
        return off, rng * reach.astype(mx.float32), {"s": reach}

    def _reach(self, t: mx.array, dtype: mx.Dtype) -> mx.array:
        """Largest of a token's entries (..., D) in ranges of their channels, without its slots."""
        place = self.dim - self.count - 1
        return saturated(mx.sort(mx.abs(t), axis=-1)[..., place : place + 1], dtype)

    def _scaled(self, t: mx.array, packed: Packed, tables: int) -> mx.array:
        off, rng = (packed[k].astype(mx.float32)[..., None, :] for k in ("off", "rng"))
        reach = self._wide(packed["s"], tables).astype(mx.float32)
        return t[..., : self.dim] * rng * reach + off

    def _native_codes(
        self, packed: Packed, start: int, stop: int, book: mx.array
    ) -> list[NativeRun]:
        off, rng = (packed[k].astype(mx.float32) for k in ("off", "rng"))
        ones = mx.broadcast_to(mx.array(1.0), (*packed["w"].shape[:3], 1))
        return [
            self._entries(packed["w"], start, stop, self.lanes, book, Scaled(rng), packed["s"]),
            NativeRun(PLAIN, ones, start, stop, 1, basis=Constant(off), dim=1),
        ]


class NuqTokenCodec(_NuqCodec):
    """Values: `off` and `rng` (B, H, T, groups), middle and half range of channels of a token."""

    spec: NuqTokenSpec

    def __init__(self, dim: int, spec: NuqTokenSpec, given: Packed | None = None) -> None:
        super().__init__(dim, spec, given)
        self.groups = self.lanes // spec.group
        self.axes |= {"off": TokenAxis(2), "rng": TokenAxis(2)}

    def _ranges(self, x: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        """Outliers, and middle and half range of each group as they are stored."""
        middle = x.mean(axis=-1, keepdims=True)
        out = mark(mx.abs(x - middle), self.count)
        missing = self.lanes - self.dim
        wide, masked = x, out
        if missing:
            edge = [(0, 0)] * 4 + [(0, missing)]
            wide, masked = mx.pad(x, edge), mx.pad(out, edge, constant_values=True)
        shape = (*x.shape[:-1], self.groups, self.spec.group)
        off, rng = _span(wide.reshape(shape), masked.reshape(shape), middle[..., None], -1)
        return out, off.squeeze(-1).astype(dtype), rng.squeeze(-1).astype(dtype)

    def _each(self, a: mx.array) -> mx.array:
        """Groups (..., groups) as channels (..., D) in fp32."""
        return mx.repeat(a.astype(mx.float32), self.spec.group, axis=-1)[..., : self.dim]

    def _learn(self, x: mx.array, dtype: mx.Dtype) -> Packed:
        x = mx.where(mx.isfinite(x), x, 0.0)
        out, off, rng = self._ranges(x, dtype)
        t = mx.where(out, 0.0, _ratio(x - self._each(off), self._each(rng)))
        t = mx.where(mx.abs(x).max(axis=-1, keepdims=True) > 0, t, _even(self.dim))
        t = t.reshape(*x.shape[:3], -1)
        return {"levels": lloyd_levels(t, self.spec.bits, self.spec.sweeps)}

    def _normal(self, x: mx.array, fitted: Packed, dtype: mx.Dtype) -> tuple[Any, ...]:
        del fitted
        _, off, rng = self._ranges(x, dtype)
        return self._each(off), self._each(rng), {"off": off, "rng": rng}

    def _scaled(self, t: mx.array, packed: Packed, tables: int) -> mx.array:
        grouped = t.reshape(*t.shape[:-1], self.groups, self.spec.group)
        off, rng = (
            self._wide(packed[k], tables).astype(mx.float32)[..., None] for k in ("off", "rng")
        )
        return (grouped * rng + off).reshape(t.shape)[..., : self.dim]

    def _native_codes(
        self, packed: Packed, start: int, stop: int, book: mx.array
    ) -> list[NativeRun]:
        groups = Groups(self.spec.group, self.dim)
        out = [
            NativeRun(PLAIN, packed["off"], start, stop, self.groups, basis=groups, dim=self.groups)
        ]
        width, words = self.spec.group, self.spec.group * self.spec.bits // 32
        for g in range(self.groups):
            own = packed["w"][..., g * words : (g + 1) * words]
            basis = Piece(g * width, min((g + 1) * width, self.dim), self.dim)
            run = self._entries(own, start, stop, width, book, basis, packed["rng"][..., g : g + 1])
            out.append(run._replace(dim=basis.stop - basis.start))
        return out
