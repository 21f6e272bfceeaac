"""Keys or values of one layer: `[sinks][body][window]`, moved along by a schedule."""

from collections.abc import Iterator

import mlx.core as mx

from veloxquant.cache.attend import decode_range
from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.store import Store
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import BODY_STEP, WINDOW_STEP, round_up
from veloxquant.quantizers.specs.plain import PlainSpec


class Stream:
    """The stores of one matrix, always in the state that its plan prescribes for its length.

    `codec` replaces the one that the plan's spec names, for constants of a layer of its own.
    """

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        plain = codec_for(PlainSpec(), dim)
        self.plan = plan
        self.sinks = Store(plain, max(1, plan.n_sink))
        self.body = Store(codec or codec_for(plan.spec, dim), round_up(BODY_STEP, plan.spec.block))
        self.window = Store(plain, WINDOW_STEP)

    @property
    def length(self) -> int:
        """Tokens held."""
        return sum(store.length for store in self.all_stores())

    def stores(self) -> tuple[Store, ...]:
        """The non-empty stores, oldest tokens first."""
        return tuple(store for store in self.all_stores() if store.length)

    def all_stores(self) -> tuple[Store, ...]:
        """Sinks, body and window, empty or not."""
        return self.sinks, self.body, self.window

    def coded_stores(self) -> tuple[Store, ...]:
        """Those that hold codes; the others hold exact rows."""
        return (self.body,)

    def arrays(self) -> Iterator[mx.array]:
        """Every buffer held."""
        for store in self.all_stores():
            yield from store.arrays()

    def append(self, x: mx.array) -> None:
        """Add (B, H, n, D) and move what the schedule says into the body."""
        room = self.plan.n_sink - self.sinks.length
        if room > 0:
            self.sinks.append(x[:, :, :room])
            x = x[:, :, room:]
        n = x.shape[2]
        if n == 0:
            return
        coded = self.coded
        move = self.plan.schedule.frontier(coded + self.window.length + n) - coded
        if move <= 0:
            self.window.append(x)
            return
        if self.window.length:
            x = mx.concatenate([self.window.decode(0, self.window.length, x.dtype), x], axis=2)
        self.encode(x[:, :, :move])
        self.window.replace(x[:, :, move:])

    @property
    def coded(self) -> int:
        """Tokens held as codes."""
        return sum(store.length for store in self.coded_stores())

    def encode(self, x: mx.array) -> None:
        """Add (B, H, n, D), as many tokens as the schedule moves, to the codes."""
        self.body.append(x)

    def trim(self, n: int) -> None:
        """Drop the newest `n` tokens and fall back to the layout of the remaining length.

        Tokens that leave the body return to the window as the codec decodes them.
        """
        keep, coded = self.length - n, self.coded
        sinks, *codes, _ = self.plan.rows(keep)
        body = sum(codes)
        if body < coded:
            stop = min(coded, keep - sinks)
            rest = keep - sinks - stop
            dtype = self._exact_dtype()
            back = [decode_range(self.coded_stores(), body, stop, dtype)] if stop > body else []
            if rest > 0:
                back.append(self.window.decode(0, rest, dtype))
            mx.eval(back)
            for store, left in zip(self.coded_stores(), codes, strict=True):
                store.trim(store.length - left)
            self.window.clear()
            if back:
                self.window.append(back[0] if len(back) == 1 else mx.concatenate(back, axis=2))
        else:
            self.window.trim(self.window.length - (keep - sinks - body))
        self.sinks.trim(self.sinks.length - sinks)

    def _exact_dtype(self) -> mx.Dtype:
        """Type of decoded rows: that of the scales, which is the input's."""
        for store in reversed(self.all_stores()):
            for a in store.arrays():
                if mx.issubdtype(a.dtype, mx.floating):
                    return a.dtype
        return mx.float32
