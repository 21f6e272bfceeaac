"""Ranges of the methods that give up tokens."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import NO_OUTLIERS, integer, one_of, refuse, unused


def check_streaming_llm(config: KVCacheConfig) -> None:
    """Sinks may be none; the window holds at least one token."""
    integer(config, "stream_n_sink", 0)
    integer(config, "stream_window_size", 1)
    unused(config, NO_OUTLIERS)


def check_snapkv(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and observation window."""
    sink = integer(config, "snap_n_sink", 0)
    window = integer(config, "snap_obs_window", 1)
    budget = integer(config, "snap_budget", 1)
    if budget <= sink + window:
        raise refuse(
            "snap_budget", budget, f"more than snap_n_sink + snap_obs_window = {sink + window}"
        )
    one_of(config, "snap_dtype", ("auto", "float32", "float16", "bfloat16"))
    one_of(config, "snap_backend", ("auto", "reference", "metal"))
    unused(config, NO_OUTLIERS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "streaming_llm": check_streaming_llm,
    "snapkv": check_snapkv,
}
