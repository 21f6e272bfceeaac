"""A head's loudest channels in a format of their own.

Source: TurboQuant (arXiv 2504.19874), section 4, and QJL (arXiv 2406.03482). Differs: the channels
are found once, in the first tokens of each head, so that tokens stay independent of each other.
"""

import mlx.core as mx

from veloxquant.kernels.native import Basis, NativeRun
from veloxquant.quantizers.base import Codec, NativeParts, Packed, Shared, is_order
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.channel_split import ChannelSplitSpec

_QUIET, _LOUD, _ORDER = "quiet.", "loud.", "order"


class _Picked:
    """The basis of one side: its channels of the model's, then the basis of its codec."""

    def __init__(self, index: mx.array, dim: int, inner: Basis | None) -> None:
        self.index, self.dim, self.inner = index, dim, inner

    def rotate_query(self, q: mx.array) -> mx.array:
        """Pick the channels of (B, H, M, D), then map them."""
        picked = _pick(q, self.index)
        return picked if self.inner is None else self.inner.rotate_query(picked)

    def unrotate(self, x: mx.array) -> mx.array:
        """Map sums back and put them at their channels, zeros elsewhere."""
        x = x if self.inner is None else self.inner.unrotate(x)
        wide = mx.zeros((*x.shape[:-1], self.dim), dtype=x.dtype)
        return mx.put_along_axis(wide, mx.broadcast_to(self.index, x.shape), x, axis=-1)


class ChannelSplitCodec(Shared):
    """The arrays of both codecs, and `order` (B, H, 1, D): quiet channels, then loud ones."""

    def __init__(
        self, dim: int, spec: ChannelSplitSpec, sides: tuple[Codec, Codec] | None = None
    ) -> None:
        self.dim, self.spec = dim, spec
        self._cut = dim - spec.n_loud
        self.quiet, self.loud = sides or (
            codec_for(spec.quiet, self._cut),
            codec_for(spec.loud, spec.n_loud),
        )
        self.axes = {_QUIET + name: axis for name, axis in self.quiet.axes.items()}
        self.axes |= {_LOUD + name: axis for name, axis in self.loud.axes.items()}

        self.foreign = (*self.quiet.foreign, *self.loud.foreign)
        self.limits = {_QUIET + name: n for name, n in self.quiet.limits.items()}
        self.limits |= {_LOUD + name: n for name, n in self.loud.limits.items()}

    def fault(self, packed: Packed) -> str | None:
        """An order that is none, or what is impossible in the arrays of a side."""
        if not is_order(packed[_ORDER]):
            return f"array {_ORDER!r} is damaged: it is no order of the channels"
        sides = ((self.quiet, _QUIET), (self.loud, _LOUD))
        found = (codec.fault(_side(packed, prefix)) for codec, prefix in sides)
        return next((text for text in found if text), None)

    def fit(self, x: mx.array) -> Packed:
        """Order of channels by mean magnitude; both sides keep their channels ascending."""
        # Contiguous, so that sums run in one order however the rows arrived.
        rows = mx.contiguous(x.astype(mx.float32))
        loudness = mx.abs(rows).mean(axis=2, keepdims=True)
        order = mx.argsort(loudness, axis=-1)
        sides = (order[..., : self._cut], order[..., self._cut :])
        return {_ORDER: mx.concatenate([mx.sort(s, axis=-1) for s in sides], axis=-1)}

    def encode(self, x: mx.array) -> Packed:
        """Pack with the channels of these very rows."""
        return self.encode_fitted(x, self.fit(x))

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D) with these channels."""
        quiet, loud = self._indices(fitted)
        out = {_QUIET + n: a for n, a in self.quiet.encode(_pick(x, quiet)).items()}
        return out | {_LOUD + n: a for n, a in self.loud.encode(_pick(x, loud)).items()}

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Sum of both sides' products."""
        quiet, loud = self._indices(packed)
        return self.quiet.scores(_pick(q, quiet), _side(packed, _QUIET)) + self.loud.scores(
            _pick(q, loud), _side(packed, _LOUD)
        )

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Weighted sums of both sides, at their channels."""
        return self._joined(
            self.quiet.mix(w, _side(packed, _QUIET)),
            self.loud.mix(w, _side(packed, _LOUD)),
            packed,
        )

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        return self._joined(
            self.quiet.decode(_side(packed, _QUIET), dtype),
            self.loud.decode(_side(packed, _LOUD), dtype),
            packed,
        )

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts | None:
        """Parts of both sides, which add up."""
        parts: list[NativeRun] = []
        for codec, prefix, index in zip(
            (self.quiet, self.loud), (_QUIET, _LOUD), self._indices(packed), strict=True
        ):
            form = codec.native(_side(packed, prefix), start, stop)
            if form is None:
                return None
            runs = (form,) if isinstance(form, NativeRun) else form
            parts += [
                r._replace(basis=_Picked(index, self.dim, r.basis), dim=r.dim or codec.dim)
                for r in runs
            ]
        return tuple(parts)

    def _indices(self, packed: Packed) -> tuple[mx.array, mx.array]:
        order = packed[_ORDER]
        return order[..., : self._cut], order[..., self._cut :]

    def _joined(self, quiet: mx.array, loud: mx.array, packed: Packed) -> mx.array:
        both = mx.concatenate([quiet, loud], axis=-1)
        return _pick(both, mx.argsort(packed[_ORDER], axis=-1))


def _side(packed: Packed, prefix: str) -> Packed:
    return {n.removeprefix(prefix): a for n, a in packed.items() if n.startswith(prefix)}


def _pick(x: mx.array, index: mx.array) -> mx.array:
    """Channels of (B, H, n, D) at (B, H, 1, k) indices."""
    wide = mx.broadcast_to(index, (*x.shape[:-1], index.shape[-1]))
    return mx.take_along_axis(x, wide, axis=-1)
