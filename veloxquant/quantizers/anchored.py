"""Tokens as multiples of exact anchor tokens, some with a coded residual.

A token is `c·a + r`: the anchor `a` whose direction is nearest, the factor that leaves the shortest
residual, and the residual in a rotated codebook where it is worth its bytes. Products need the
anchors once: a token's score is `c` times the score of its anchor, and weights are summed by anchor
before values are.
Source: none; a design of this library for `anchorkv`, residuals as in TurboQuant (arXiv
2504.19874).
"""

from typing import NamedTuple

import mlx.core as mx

from veloxquant.kernels import native
from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.base import NativeParts, Packed, Shared, TokenAxis
from veloxquant.quantizers.classed import ClassedCodec, Part
from veloxquant.quantizers.codebook import CodebookCodec, narrow
from veloxquant.quantizers.saliency import rank, unit_rows
from veloxquant.quantizers.specs.anchored import AnchorSpec, ProjectedSpec

_TINY = 1e-30


class Choice(NamedTuple):
    """What keys and values of some blocks have in common, and the anchors of one side."""

    classes: mx.array
    """(B, H, n): 0 for tokens with a residual."""
    ids: mx.array
    """(B, H, n) anchor of each token, counted from the start of the sequence."""
    coded: mx.array
    """(B, H, n) whether the residual is stored; False for places of class 0 that are not needed."""
    picks: mx.array
    """(B, H, n/block · anchors) places of the anchors in the n tokens."""


def pick_anchors(keys: mx.array, count: int, lead: int = 0) -> mx.array:
    """Places (B, H, count) of the anchors of one block (B, H, n, D).

    The first is the token nearest to all others; each next one is the least like those picked. The
    first `lead` rows are zeros and no tokens; they come last.
    """
    unit = unit_rows(keys.astype(mx.float32))
    like = (unit * unit.mean(axis=2, keepdims=True)).sum(axis=-1)
    free = mx.full(like.shape, 1.0)
    near = mx.zeros(like.shape)
    at, places = mx.arange(keys.shape[2]), []
    last = mx.where(at < lead, 4.0, 0.0)  # more than cosines differ by
    for i in range(count):
        worth = (-near if i else like) - last
        place = mx.argmax(mx.where(free > 0, worth, -mx.inf), axis=-1)
        places.append(place)
        free = mx.where(at == place[..., None], 0.0, free)
        own = mx.take_along_axis(unit, place[..., None, None], axis=2)
        near = mx.maximum(near, mx.abs((unit * own).sum(axis=-1)))
    return mx.stack(places, axis=-1)


def take_rows(x: mx.array, places: mx.array) -> mx.array:
    """Rows (B, H, m, D) of (B, H, n, D) at (B, H, m)."""
    return mx.take_along_axis(x, places[..., None].astype(mx.uint32), axis=2)


def nearest(keys: mx.array, anchors: mx.array) -> mx.array:
    """Number of the anchor (B, H, a, D) that is most parallel to each key (B, H, n, D)."""
    cosine = unit_rows(keys.astype(mx.float32)) @ unit_rows(anchors.astype(mx.float32)).swapaxes(
        -1, -2
    )
    return mx.argmax(mx.abs(cosine), axis=-1)


def project(x: mx.array, anchors: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
    """Factor and residual of each row by its anchor.

    Args:
        x: (B, H, n, D).
        anchors: (B, H, a, D).
        ids: (B, H, n).

    Returns:
        Factors (B, H, n, 1) in the type of `x`, and what they leave over, fp32.
    """
    base = take_rows(anchors, ids).astype(mx.float32)
    x32 = x.astype(mx.float32)
    # Divided by the peak first, so that squares of large rows stay finite.
    peak = mx.maximum(mx.abs(base).max(axis=-1, keepdims=True), _TINY)
    unit = base / peak
    inner, square = ((a * unit).sum(axis=-1, keepdims=True) for a in (x32, unit))
    # A row that is its anchor must come back exactly.
    exact = (x32 == base).all(axis=-1, keepdims=True)
    factor = mx.where(exact, 1.0, inner / mx.maximum(square * peak, _TINY))
    factor = mx.clip(factor, -6e4, 6e4).astype(x.dtype)
    return factor, x32 - factor.astype(mx.float32) * base


def relative(residual: mx.array, x: mx.array) -> mx.array:
    """Length of each residual over that of its row, 0 for rows without length: (B, H, n)."""
    lost, whole = (mx.linalg.norm(a.astype(mx.float32), axis=-1) for a in (residual, x))
    return mx.where(whole > 0, lost / mx.maximum(whole, _TINY), 0.0)


class Projection:
    """The basis in which a token is one number: the products with every anchor."""

    def __init__(self, anchors: mx.array) -> None:
        self.anchors = anchors.astype(mx.float32)

    def rotate_query(self, q: mx.array) -> mx.array:
        """Products of queries with the anchors, (B, H, M, a)."""
        return q @ self.anchors.astype(q.dtype).swapaxes(-1, -2)

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of weights by anchor as sums of rows."""
        return x @ self.anchors.astype(x.dtype)


class ProjectedCodec(Shared):
    """`i` (B, H, T, 1) uint16 and `f` (B, H, T, 1); `w`, `n` of residuals. Reads anchors `a`."""

    def __init__(self, dim: int, spec: ProjectedSpec) -> None:
        self.dim, self.spec = dim, spec
        rest = spec.residual()
        self.rest = CodebookCodec(dim, rest) if rest else None
        self.axes = {"i": TokenAxis(2), "f": TokenAxis(2)}
        if self.rest is not None:
            self.axes |= self.rest.axes

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) by the first row."""
        return self.encode_by(x, x[:, :, :1], mx.zeros(x.shape[:3], dtype=mx.uint32), None)

    def encode_by(
        self, x: mx.array, anchors: mx.array, ids: mx.array, coded: mx.array | None
    ) -> Packed:
        """Pack (B, H, n, D) by the anchors of these numbers; residuals where `coded`."""
        factor, residual = project(x, anchors, ids)
        out = {"i": ids[..., None].astype(mx.uint16), "f": factor}
        if self.rest is not None:
            if coded is not None:
                residual = mx.where(coded[..., None], residual, 0.0)
            out |= self.rest.encode(residual, narrow(x.dtype))
        return out

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ: a score for each anchor, spread to its tokens."""
        by_anchor = Projection(packed["a"]).rotate_query(q)
        ids = packed["i"].squeeze(-1)[:, :, None].astype(mx.uint32)
        out = mx.take_along_axis(by_anchor, ids, axis=-1)
        out = out * packed["f"].astype(q.dtype).swapaxes(-1, -2)
        return out if self.rest is None else out + self.rest.scores(q, packed)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V: weights summed by anchor, then one product with the anchors."""
        batch, heads, rows, n = w.shape
        anchors = packed["a"]
        scaled = (w * packed["f"].astype(w.dtype).swapaxes(-1, -2)).swapaxes(-1, -2)
        at = packed["i"].reshape(batch * heads, n).astype(mx.uint32)
        head = mx.arange(batch * heads)[:, None]
        sums = mx.zeros((batch * heads, anchors.shape[2], rows), dtype=w.dtype)
        sums = sums.at[head, at].add(scaled.reshape(batch * heads, n, rows))
        sums = sums.reshape(batch, heads, anchors.shape[2], rows).swapaxes(-1, -2)
        out = Projection(anchors).unrotate(sums)
        return out if self.rest is None else out + self.rest.mix(w, packed)

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts | None:
        """One slot a token in the basis of the anchors, and the residual beside it."""
        anchors = packed["a"]
        if anchors.shape[2] > native.MAX_DIM:
            return None
        run = NativeRun(
            native.SPARSE, packed["i"], start, stop, 1, scale=packed["f"],
            basis=Projection(anchors), dim=anchors.shape[2],
        )  # fmt: skip
        return run if self.rest is None else (run, self.rest.native(packed, start, stop))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        base = take_rows(packed["a"], packed["i"].squeeze(-1)).astype(mx.float32)
        rows = base * packed["f"].astype(mx.float32)
        if self.rest is not None:
            rows = rows + self.rest.decode(packed, mx.float32)
        return rows.astype(dtype)


class AnchorCodec(ClassedCodec):
    """Classes with and without residuals, and the anchors `a` (B, H, T·anchors/block, D).

    Where the format owns no numbers, `lent` names the arrays that reading takes from elsewhere.
    """

    spec: AnchorSpec
    whole = frozenset({"a"})

    def __init__(self, dim: int, spec: AnchorSpec) -> None:
        super().__init__(dim, spec)
        self.axes["a"] = TokenAxis(2, spec.anchors, spec.size)
        numbers = frozenset({"m", *(f"i{part.number}" for part in self.parts)})
        self.lent: frozenset[str] = frozenset() if spec.owns else numbers
        self.axes = {name: axis for name, axis in self.axes.items() if name not in self.lent}

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) as the start of a sequence, keys and values alike."""
        choice = choose(x, x, (x[:, :, :0], x[:, :, :0]), self.spec, 0.0)
        return self.encode_chosen(x, choice, x[:, :, :0])

    def encode_chosen(self, x: mx.array, choice: Choice, before: mx.array) -> Packed:
        """Pack whole blocks (B, H, n, D); `before` are the anchors of the sequence so far."""
        batch, heads, n, _ = x.shape
        own = take_rows(x, choice.picks)
        anchors = mx.concatenate([before, own], axis=2)
        order = self.sorted_places(choice.classes)
        flat = order + (mx.arange(n // self.spec.size) * self.spec.size)[:, None]
        out, start = {"m": self.map_of(choice.classes), "a": own}, 0
        for part in self.parts:
            places = flat[..., start : start + part.tokens].reshape(batch, heads, -1)
            start += part.tokens
            ids, coded = (
                mx.take_along_axis(a, places, axis=-1) for a in (choice.ids, choice.coded)
            )
            codec = part.codec
            assert isinstance(codec, ProjectedCodec)
            packed = codec.encode_by(take_rows(x, places), anchors, ids, coded)
            out |= {f"{name}{part.number}": a for name, a in packed.items()}
        return {name: a for name, a in out.items() if name in self.axes}

    def fault(self, packed: Packed) -> str | None:
        """Tokens of anchors that came later or not at all."""
        if self.lent:
            return None
        for part in self.parts:
            ids = packed[f"i{part.number}"].astype(mx.uint32)
            blocks = mx.arange(ids.shape[2], dtype=mx.uint32) // part.tokens
            if (ids >= (blocks[:, None] + 1) * self.spec.anchors).any().item():
                return f"array 'i{part.number}' is damaged: it names anchors that are not there"
        return super().fault(packed)

    def by_class(self, packed: Packed) -> list[tuple[Part, Packed]]:
        """The arrays of each class, with all anchors."""
        return [(part, own | {"a": packed["a"]}) for part, own in super().by_class(packed)]


def choose(
    keys: mx.array,
    values: mx.array,
    before: tuple[mx.array, mx.array],
    spec: AnchorSpec,
    theta: float,
) -> Choice:
    """Anchors, nearest anchors and residual places of whole blocks, one block after the other.

    Args:
        keys: (B, H, n, Dk).
        values: (B, H, n, Dv).
        before: anchors of the sequence so far, of keys and of values.
        spec: block, anchors, places for residuals and, where a sequence begins, those of no token.
        theta: relative residual of key and value below which none is stored.
    """
    slots, _ = spec.classes[0]
    known, parts = before, []
    for start in range(0, keys.shape[2], spec.size):
        k, v = (a[:, :, start : start + spec.size] for a in (keys, values))
        lead = 0 if known[0].shape[2] else spec.lead
        picks = pick_anchors(k, spec.anchors, lead)
        known = tuple(
            mx.concatenate([a, take_rows(b, picks)], axis=2)
            for a, b in zip(known, (k, v), strict=True)
        )
        total = known[0].shape[2]
        own = mx.arange(total - spec.anchors, total)
        at = mx.arange(spec.size)
        place = at[:, None] == picks[:, :, None]
        is_anchor = place.any(axis=-1)
        ids = mx.where(is_anchor, (place * own).sum(axis=-1), nearest(k, known[0]))
        errors = [relative(project(x, a, ids)[1], x) for x, a in zip((k, v), known, strict=True)]
        worth = ~is_anchor & ((errors[0] >= theta) | (errors[1] >= theta))
        # Anchors come last of all tokens: they never take a place of class 0 from one.
        utility = mx.where(worth, errors[0] + errors[1], mx.where(is_anchor, -2.0, -1.0))
        utility = mx.where(at < lead, -3.0, utility)
        classes = (rank(utility) >= slots).astype(mx.uint32)
        coded = worth & (classes == 0) & (at >= lead)
        parts.append((classes, ids.astype(mx.uint32), coded, picks + start))
    return Choice(*(mx.concatenate(list(each), axis=2) for each in zip(*parts, strict=True)))
