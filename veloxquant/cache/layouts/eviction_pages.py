"""Sizes of the methods that give up tokens by geometry, by repetition, or keep pages of keys."""

from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.layouts.eviction import RATED, SCORED, Extra, answers_add, kept_held, one_more
from veloxquant.cache.layouts.kept_rows import KeptRows
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import Held, LayerShape
from veloxquant.quantizers.specs.pages import PageSplit

FP32 = 4


def qfilters_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The first queries until the first eviction; then scores and the filter.

    Without a calibration nothing goes before `qfilters_calib_tokens` are there.
    """
    del decoded
    count = config.qfilters_calib_tokens
    rows = tokens if tokens < count else min(tokens, config.qfilters_budget)
    if rows == tokens:
        return kept_held(config, shape, tokens, rows, Extra(ring=count, whole_prompt=False))
    filters = shape.n_kv_heads * shape.k_dim * FP32
    held = kept_held(config, shape, tokens, rows, RATED).plus(filters)
    # With the queries, up to the length at which rows go first.
    waiting = qfilters_held(config, shape, max(rows, count - 1))
    more = one_more(config, held, shape).above
    above, peak = max(more, waiting.most - held.nbytes), max(held.peak, waiting.peak)
    return held._replace(above=above, peak=peak)


def curdkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """Rows and their leverages, and the directions of keys and values."""
    del decoded
    rows = min(tokens, config.curdkv_budget)
    if rows == tokens:
        return kept_held(config, shape, tokens, rows, Extra())
    held = kept_held(config, shape, tokens, rows, Extra(numbers=1))
    wide = shape.n_kv_heads * (shape.k_dim + shape.v_dim) * FP32
    bases, rated = wide * config.curdkv_rank_cap, wide * tokens
    return Held(held.nbytes + bases, rows, held.peak + bases + rated, held.work + rated)


def rocketkv_split(config: KVCacheConfig) -> PageSplit:
    """The sizes of both stages."""
    return PageSplit(
        config.rocketkv_compression_ratio, config.rocketkv_n_sink, config.rocketkv_obs_window,
        config.rocketkv_page_size, config.rocketkv_head_topk1,
    )  # fmt: skip


def rocketkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """Rows that stay of a prompt, and two bounds of every finished page, in the keys' form."""
    split = rocketkv_split(config)
    prompt = tokens - decoded
    rows = min(prompt, split.rows(prompt)) + decoded
    held = kept_held(config, shape, tokens, rows, Extra(window=config.rocketkv_obs_window))
    if rows == tokens:
        return held
    bounds = 2 * KeptRows.of(config, shape).keys(rows // split.page)
    return Held(held.nbytes + bounds, rows, held.peak + bounds, held.work)


def kvzip_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The mean over heads; those of unequal rows have counts instead of scores."""
    rows = min(tokens - decoded, config.kvzip_budget) + decoded
    if config.kvzip_scope == "head" or rows == tokens:
        return kept_held(config, shape, tokens, rows, SCORED)
    held = kept_held(config, shape, tokens, rows, Extra(scored=SCORED.scored))
    counts = FP32 * shape.n_kv_heads if shape.n_kv_heads > 1 else 0
    return held.plus(counts)


HELD: dict[str, SizeOf] = {
    "qfilters": qfilters_held,
    "curdkv": curdkv_held,
    "kvzip": answers_add(kvzip_held),
    "rocketkv": answers_add(rocketkv_held),
}
