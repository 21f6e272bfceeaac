"""Keys or values of one layer in tiers of age: `[old][mid][recent][exact]`, moved along by a plan.

What moves are packed codes: a tier hands its oldest blocks to the tier before it, which renumbers
them for its own grid. Codes are always made for the youngest grid first, so a token that was
demoted twice and one that was coded into the oldest tier at once have the same codes.
"""

from typing import cast

import mlx.core as mx

from veloxquant.cache.layouts.tiered import AgePlan
from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.store import Store
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.base import Codec, Packed
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.nested import NestedChannelCodec, recode_along
from veloxquant.quantizers.sizes import WINDOW_STEP, round_up
from veloxquant.quantizers.specs.plain import PlainSpec


class Tier(Store):
    """A store whose blocks come and go as codes; buffers end where their tokens end."""

    @property
    def chain(self) -> tuple[int, ...]:
        """Widths that codes of this tier went through, the present one last."""
        return cast(NestedChannelCodec, self.codec).chain

    def push(self, packed: Packed, n: int) -> None:
        """Add the codes of `n` tokens."""
        self._put(packed, n)

    def codes(self, start: int, stop: int) -> Packed:
        """Codes of the tokens [start, stop), whole blocks."""
        return {name: self._range(name, start, stop) for name in self._arrays}

    def pop(self, n: int) -> Packed:
        """Take the oldest `n` tokens out, whole blocks."""
        out = {name: mx.contiguous(a) for name, a in self.codes(0, n).items()}
        left = self.length - n
        if left:
            self._window(n, n + round_up(left, self.step))
            self._start, self._stop = 0, left
        else:
            self.clear()
        return out


class AgeStream(Stream):
    """The tiers of one matrix, always in the state that the plan prescribes for their length."""

    plan: AgePlan

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        assert codec is None, "tiers share one grid; a codec of one layer would not fit them all"
        self.plan = cast(AgePlan, plan)
        self.tiers = tuple(
            Tier(codec_for(spec, dim), round_up(step, spec.block))
            for spec, step in self.plan.tiers()
        )
        self.window = Store(codec_for(PlainSpec(), dim), WINDOW_STEP)

    @property
    def length(self) -> int:
        """Tokens held."""
        return sum(store.length for store in self.all_stores())

    def stores(self) -> tuple[Store, ...]:
        """The non-empty stores, oldest tokens first."""
        return tuple(store for store in self.all_stores() if store.length)

    def all_stores(self) -> tuple[Store, ...]:
        """Every tier, oldest first, and the window."""
        return (*self.tiers, self.window)

    def coded_stores(self) -> tuple[Store, ...]:
        """The tiers."""
        return self.tiers

    def append(self, x: mx.array) -> None:
        """Add (B, H, n, D); blocks that have grown too old pass to their tier."""
        *due, rest = self.plan.rows(self.length + x.shape[2])
        for i, tier in enumerate(self.tiers):
            for younger in self.tiers[i + 1 :]:
                missing = due[i] - tier.length
                if (n := min(missing, younger.length)) > 0:
                    tier.push(self._aged(younger.pop(n), younger, tier), n)
        fresh = [n - tier.length for n, tier in zip(due, self.tiers, strict=True)]
        if not sum(fresh):
            self.window.append(x)
            return
        if self.window.length:
            x = mx.concatenate([self.window.decode(0, self.window.length, x.dtype), x], axis=2)
        start = 0
        for tier, n in zip(self.tiers, fresh, strict=True):
            tier.append(x[:, :, start : start + n])
            start += n
        assert x.shape[2] - start == rest
        self.window.replace(x[:, :, start:])

    @staticmethod
    def _aged(packed: Packed, younger: Tier, older: Tier) -> Packed:
        return recode_along(packed, older.chain[len(younger.chain) - 1 :])

    def trim(self, n: int) -> None:
        """Drop the newest `n` tokens and fall back to the layout of the remaining length.

        Tokens that are young again go back on their old grid: their values stay as they are.
        """
        keep = self.length - n
        *due, rest = self.plan.rows(keep)
        first = keep - rest
        tail = self._tail(first, keep)
        mx.eval(tail)
        pieces: list[list[Packed]] = [[] for _ in due]
        begin = 0
        for source in self.tiers:
            end = begin + source.length
            low = 0
            for place, (tier, size) in enumerate(zip(self.tiers, due, strict=True)):
                start, stop = max(begin, low), min(end, low + size)
                if start < stop:
                    part = source.codes(start - begin, stop - begin)
                    back = source.chain[len(tier.chain) - 1 :][::-1]
                    pieces[place].append(recode_along(part, back))
                low += size
            begin = end
        for tier, parts, size in zip(self.tiers, pieces, due, strict=True):
            tier.clear()
            if parts:
                axes = tier.codec.axes
                whole = {
                    name: mx.contiguous(
                        mx.concatenate([part[name] for part in parts], axis=axes[name].axis)
                    )
                    for name in axes
                }
                tier.push(whole, size)
        self.window.clear()
        if tail is not None:
            self.window.append(tail)

    def _tail(self, first: int, keep: int) -> mx.array | None:
        """Tokens [first, keep) as rows, None when there are none."""
        rows, begin, dtype = [], 0, self._exact_dtype()
        for store in self.all_stores():
            start, stop = max(first - begin, 0), min(keep - begin, store.length)
            if start < stop:
                rows.append(store.decode(start, stop, dtype))
            begin += store.length
        return mx.concatenate(rows, axis=2) if rows else None
