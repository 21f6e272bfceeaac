"""rocketkv: a coarse eviction after the prompt, then each token reads a few pages of the rest.

When a prompt of N tokens is complete, N / c1 rows stay, chosen as snapkv does with a wide maximum
(63) and the sum over query heads. From then on a single query reads N / (2c) tokens exactly: whole
pages of consecutive rows, found by bounds of their keys on the query's strongest channels, and the
rows of the last, unfinished page. c is `rocketkv_compression_ratio`, c1 and the page size follow
from it. Blocks of tokens (another turn) read everything held, and are compressed like a prompt.
Packed rows (`eviction_storage`) have bounds in the keys' form, of the keys as they read unpacked.
The ratio is of what a token reads, not of memory: at 8 and 128 channels the rows and the bounds
take 1 / 1.47 of the full cache.
Source: Behnam et al., RocketKV, 2025, arXiv 2502.14051, section 3. Differs: `rocketkv_n_sink` first
rows stay; the rows of the unfinished page are always read.
Without true queries the rows that stay are KeyDiff's (arXiv 2504.15364), everything held is read,
and the cache says `proxy`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from veloxquant.cache.attend import Fresh, Run, attend
from veloxquant.cache.attention_rows import softmax_beside
from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.layouts.eviction_pages import rocketkv_split
from veloxquant.cache.picked import Picked
from veloxquant.cache.scorers import WindowAttention
from veloxquant.cache.store import Store
from veloxquant.cache.view import AttentionCall
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.rocketkv import (
    build_paged_summary_batched,
    page_estimates,
    page_numbers,
    select_topk_pages,
)
from veloxquant.quantizers.sizes import WINDOW_STEP, CodecSpec, LayerShape
from veloxquant.quantizers.specs.plain import PlainSpec

POOL_KERNEL = 63


class RocketKVKVCache(EvictingCache):
    """Rows, and bounds of the keys of every finished page once rows were evicted."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        self.split = rocketkv_split(config)
        n_sink, window = self.split.n_sink, self.split.window
        # The budget is known once the prompt is.
        policy = Policy(n_sink + window + 1, n_sink, window, trigger="prompt_end")
        scorer = WindowAttention(window, POOL_KERNEL, pool="max", group="sum")
        super().__init__(shape, config.method, policy, scorer)
        self.dim = shape.k_dim
        self.page_max = Store(codec_for(PlainSpec(), shape.k_dim), WINDOW_STEP)
        self.page_min = Store(codec_for(PlainSpec(), shape.k_dim), WINDOW_STEP)
        self.prompt_tokens = 0
        """Tokens seen at the last eviction, 0 before it."""

    def hold_in(self, keys: CodecSpec, values: CodecSpec) -> None:
        """Pack rows in these forms and bounds as keys: at a page of two rows they are as many."""
        super().hold_in(keys, values)
        self.page_max = Store(codec_for(keys, self.dim), WINDOW_STEP)
        self.page_min = Store(codec_for(keys, self.dim), WINDOW_STEP)

    # ---- rows and pages -----------------------------------------------------------------

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append rows, and the bounds of the pages they finish."""
        super().write(keys, values)
        self._bound()

    def _bound(self) -> None:
        """Bounds of finished pages that have none; none at all before an eviction."""
        size, have = self.page_size, self.page_max.length
        done = self.rows // size if self.prompt_tokens else 0
        if done <= have:
            return
        keys = self.key_rows.decode(have * size, done * size, self._dtype)
        for store, bounds in zip(
            (self.page_max, self.page_min), build_paged_summary_batched(keys, size), strict=True
        ):
            store.append(bounds)

    def settle(self) -> None:
        """After a prompt the rows beyond its budget go, and pages are made anew."""
        if not self._due:
            return
        before = self.evicted
        self.policy = replace(self.policy, budget=self.split.rows(self.offset))
        super().settle()
        if self.evicted > before:
            self.prompt_tokens = self.offset
            self.page_max.clear()
            self.page_min.clear()
            self._bound()
            self._unevaluated = list(self.arrays())

    def drop(self, n: int) -> int:
        """Rewind rows and the pages they finished."""
        done = super().drop(n)
        for store in (self.page_max, self.page_min):
            store.trim(store.length - min(store.length, self.rows // self.page_size))
        return done

    # ---- reading ------------------------------------------------------------------------

    @property
    def pages_read(self) -> int:
        """Finished pages that a single query reads."""
        return -(-self.split.read(self.prompt_tokens) // self.page_size)

    def _sparse(self) -> bool:
        """Whether a single query leaves rows out."""
        return self.pages_read < self.page_max.length and not self._due

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of (B, Hq, L, D): of a single query with its pages, else with all rows.

        Raises:
            CacheStateError: when the cache moved on since the view was made.
        """
        if not call.of_one_token(self.rows) or not self._sparse():
            return super().attend(call)
        queries, scale, sinks = call.queries, call.scale, call.sinks
        batch, heads, dim, v_dim = self._known_shape()
        index = self._picked(queries.reshape(batch, heads, -1, dim), scale, sinks)
        if self.writes_through:
            sides = (self._exact(store, index) for store in (self.key_rows, self.value_rows))
            out = mx.fast.scaled_dot_product_attention(
                queries, *sides, scale=scale, mask=None, sinks=sinks
            )
        else:
            runs = (self._packed(side, index) for side in (0, 1))
            out = attend(
                queries, *runs, n_kv=heads, v_dim=v_dim, scale=scale, mask=None, sinks=sinks,
                use_kernels=self.use_kernels,
            )  # fmt: skip
        if call.owner:
            self.observe(queries, scale, sinks)
        return self._settled(out)

    def _exact(self, store: Store, index: mx.array) -> mx.array:
        """Rows at `index` and those of the unfinished page."""
        rows = store.decode(0, self.rows, self._dtype)
        picked = mx.take_along_axis(rows, index[..., None], axis=2)
        tail = self.page_max.length * self.page_size
        return mx.concatenate([picked, rows[:, :, tail:]], axis=2) if tail < self.rows else picked

    def _packed(self, side: int, index: mx.array) -> list[Run]:
        """The same rows of keys (0) or values (1), picked as they are packed, and the new one."""
        store = (self.key_rows, self.value_rows)[side]
        tail = mx.arange(self.page_max.length * self.page_size, store.length, dtype=mx.int32)
        tail = mx.broadcast_to(tail, (*index.shape[:2], tail.size))
        runs: list[Run] = [Picked(store, mx.concatenate([index, tail], axis=-1))]
        if self.pending is not None:
            runs.append(Fresh(self.pending[side]))
        return runs

    def _picked(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Ascending rows (B, H, n) of finished pages that queries (B, H, G, D) read."""
        pages = self.page_max.length
        bounds = (store.decode(0, pages, self._dtype) for store in (self.page_max, self.page_min))
        return self._best(queries, *bounds, scale=scale, sinks=sinks)

    def _best(
        self,
        queries: mx.array,
        page_max: mx.array,
        page_min: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        q = queries.astype(mx.float32)
        products, share = page_estimates(q, page_max, page_min, self.head_topk1)
        # Fewer channels make smaller products: the softmax is sharpened back (SparQ's rule).
        logits = products * scale * mx.rsqrt(mx.maximum(share, 1e-12))
        edges = None if sinks is None else sinks.reshape(1, logits.shape[1], -1, 1)
        mass = softmax_beside(logits, edges).sum(axis=-2)
        return page_numbers(select_topk_pages(mass, self.pages_read), self.page_size)

    def select_indices(self, query: mx.array, b: int, h: int, keep_recent: int = 0) -> mx.array:
        """Rows that a query of one KV head reads, ascending int32 indices into the rows held.

        Args:
            query: (D,), or (G, D) for the query heads of the KV head together.
            b: sequence of the batch.
            h: KV head.
            keep_recent: newest rows to read in any case.

        Raises:
            ValueError: for a query of another size.
        """
        if query.ndim not in (1, 2) or query.shape[-1] != self.dim:
            raise ValueError(f"a query of shape {query.shape}; give (D,) or (G, D), D={self.dim}")
        self.commit()
        rows = mx.arange(self.rows, dtype=mx.int32)
        if not self._sparse():
            return rows
        pages = self.page_max.length
        sides = (s.decode(0, pages, self._dtype)[b, h] for s in (self.page_max, self.page_min))
        chosen = self._best(query.reshape(-1, self.dim), *sides, scale=self.dim**-0.5)
        read = mx.zeros((self.rows,), dtype=mx.bool_)
        read[chosen] = True
        first = min(pages * self.page_size, self.rows - max(0, min(keep_recent, self.rows)))
        read = read | (rows >= first)
        count: Any = read.sum().item()
        return mx.sort(mx.where(read, rows, self.rows))[:count]

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """Columns, the scorer's, and the bounds."""
        yield from super().extra_arrays()
        yield from self.page_max.arrays()
        yield from self.page_min.arrays()

    def extra_state(self) -> list[Any]:
        """As every evicting cache, and the length of the prompt; bounds follow from the rows."""
        return [*super().extra_state(), self.prompt_tokens]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        super().restore_extra(saved[:-1])
        self.prompt_tokens = int(saved[-1])
        self.page_max.clear()
        self.page_min.clear()
        self._bound()

    # ---- counters of the documents ------------------------------------------------------

    @property
    def stage1_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes

    @property
    def stage2_aux_bytes(self) -> int:
        """Bytes of the bounds of pages, without growth steps."""
        stores = (self.page_max, self.page_min)
        return sum(s.length * s.nbytes // max(1, s.capacity) for s in stores)

    @property
    def full_fp16_bytes_total(self) -> int:
        """Bytes that all tokens would take in 16 bits."""
        return self.full_bytes()

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes of rows and bounds: memory, not traffic."""
        held = self.stage1_bytes + self.stage2_aux_bytes
        return self.full_bytes() / held if held else 1.0

    @property
    def tokens_total(self) -> int:
        """Tokens seen."""
        return self.offset

    @property
    def keep_rate(self) -> float:
        """Rows held over tokens seen; 1.0 while empty."""
        return self.rows / self.offset if self.offset else 1.0

    @property
    def stage1_ratio(self) -> float:
        """Part of the ratio that eviction takes."""
        return self.split.stages[0]

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.split.page

    @property
    def head_topk1(self) -> int:
        """Channels of a query that estimates read."""
        return self.split.head_channels(self.dim)


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> RocketKVKVCache:
    """The cache of one layer.

    Raises:
        QuantizerConfigError: when more channels are asked for than a head has.
    """
    channels = config.rocketkv_head_topk1
    if channels is not None and channels > shape.k_dim:
        raise QuantizerConfigError(
            f"rocketkv_head_topk1={channels} is more than the {shape.k_dim} channels of this "
            f"layer's heads; set it to {shape.k_dim} or less, or leave it unset"
        )
    return RocketKVKVCache(config, shape)
