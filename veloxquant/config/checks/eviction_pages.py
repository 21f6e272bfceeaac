"""Ranges of the methods that give up tokens by geometry, by repetition, or keep pages of keys."""

from collections.abc import Callable

from veloxquant.config.checks.eviction import budget_over, rope_base
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import AFFINE_BITS, bits, integer, one_of, real

CURDKV_RECENT = 16
"""Newest rows that always stay: they have no neighbours yet to be judged by."""
QUERY_ROWS = 256
"""Most queries that a window may hold: they are scored at once."""
KVZIP_NEIGHBOURS = 2
"""Rows behind which a query's attention counts: itself and its neighbour saturate."""
MOST_CALIB_TOKENS = 65_536
"""First queries that are held until there is a filter."""


def check_qfilters(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and the newest row."""
    sink, recent = integer(config, "qfilters_n_sink", 0), integer(config, "qfilters_recent", 0)
    least = sink + max(1, recent)
    budget_over(config, "qfilters_budget", least, "qfilters_n_sink + max(1, qfilters_recent)")
    integer(config, "qfilters_calib_tokens", 8, MOST_CALIB_TOKENS)
    one_of(config, "qfilters_sign", (1, -1))
    if config.qfilters_min_retention is not None:
        real(config, "qfilters_min_retention", 0.0, 1.0)
    one_of(config, "qfilters_on_low_retention", ("warn", "raise", "ignore"))


def check_curdkv(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and the newest rows."""
    sink = integer(config, "curdkv_n_sink", 0)
    least = sink + CURDKV_RECENT
    budget_over(config, "curdkv_budget", least, f"curdkv_n_sink + {CURDKV_RECENT}")
    integer(config, "curdkv_rank_cap", 1)
    rope_base(config, "curdkv_rope_base")


def check_kvzip(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and the newest rows, which no query judged."""
    least = integer(config, "kvzip_n_sink", 0) + KVZIP_NEIGHBOURS
    budget_over(config, "kvzip_budget", least, f"kvzip_n_sink + {KVZIP_NEIGHBOURS}")
    one_of(config, "kvzip_probe", ("context", "reconstruct"))
    one_of(config, "kvzip_scope", ("head", "model"))


def check_rocketkv(config: KVCacheConfig) -> None:
    """A ratio of at least 1; overrides are whole numbers or unset."""
    bits(config, AFFINE_BITS)
    real(config, "rocketkv_compression_ratio", 1.0, 1e6)
    for field in ("rocketkv_page_size", "rocketkv_head_topk1"):
        if getattr(config, field) is not None:
            integer(config, field, 1)
    integer(config, "rocketkv_obs_window", 1, QUERY_ROWS)
    integer(config, "rocketkv_n_sink", 0)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "qfilters": check_qfilters,
    "curdkv": check_curdkv,
    "kvzip": check_kvzip,
    "rocketkv": check_rocketkv,
}
