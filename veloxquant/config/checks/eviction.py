"""Ranges of the methods that give up tokens."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    flag,
    integer,
    one_of,
    real,
    refuse,
    sinks,
)


def check_streaming_llm(config: KVCacheConfig) -> None:
    """Sinks may be none; the window holds at least one token."""
    sinks(config, "stream_n_sink")
    integer(config, "stream_window_size", 1)


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
    flag(config, "snap_batched_scoring")


def budget_over(config: KVCacheConfig, field: str, least: int, what: str) -> None:
    """The budget is more than the rows that stay in any case, `least` of them, named `what`."""
    budget = integer(config, field, 1)
    if budget <= least:
        raise refuse(field, budget, f"more than {what} = {least}")


def check_h2o(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and newcomers."""
    sink, grace = integer(config, "h2o_n_sink", 0), integer(config, "h2o_grace", 1)
    budget_over(config, "h2o_budget", sink + grace, "h2o_n_sink + h2o_grace")
    real(config, "h2o_decay", 0.0, 1.0, open_low=True)
    rope_base(config, "h2o_rope_base")


def rope_base(config: KVCacheConfig, field: str) -> None:
    """A base of positions is above 1; it only served scores without queries, and is not needed."""
    real(config, field, 1.0, 1e12, open_low=True)


def check_tova(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and the newest row."""
    sink = integer(config, "tova_n_sink", 0)
    budget_over(config, "tova_budget", sink + 1, "tova_n_sink + 1")
    one_of(config, "tova_backend", ("auto", "reference", "metal"))


def check_keyformer(config: KVCacheConfig) -> None:
    """Sinks and recent rows fit the budget; temperatures rise."""
    sink, recent = integer(config, "keyformer_n_sink", 0), integer(config, "keyformer_recent", 0)
    least = sink + max(1, recent)
    budget_over(config, "keyformer_budget", least, "keyformer_n_sink + max(1, keyformer_recent)")
    low = real(config, "keyformer_tau_init", 0.0, 1e6, open_low=True)
    real(config, "keyformer_tau_end", low, 1e6)
    if config.keyformer_tau is not None:
        real(config, "keyformer_tau", 0.0, 1e6, open_low=True)
    integer(config, "keyformer_anneal_steps", 0)
    rope_base(config, "keyformer_rope_base")
    integer(config, "keyformer_seed", 0)


def check_morphkv(config: KVCacheConfig) -> None:
    """Sinks, the window and the newest row fit the budget."""
    sink, window = integer(config, "morphkv_n_sink", 0), integer(config, "morphkv_window", 1)
    budget_over(config, "morphkv_budget", sink + window + 1, "morphkv_n_sink + morphkv_window + 1")


def check_cam(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and the newest row."""
    sink = integer(config, "cam_n_sink", 0)
    budget_over(config, "cam_budget", sink + 1, "cam_n_sink + 1")
    one_of(config, "cam_merge", ("sim_weighted", "mean", "sequential"))
    if flag(config, "cam_merge_keys") and config.cam_merge == "sequential":
        raise refuse("cam_merge_keys", True, "False with cam_merge='sequential'")
    flag(config, "cam_merge_gate")


def check_knorm(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and recent rows."""
    sink, recent = integer(config, "knorm_n_sink", 0), integer(config, "knorm_recent", 0)
    budget_over(config, "knorm_budget", sink + recent, "knorm_n_sink + knorm_recent")
    one_of(config, "knorm_keep", ("low", "high"))


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "streaming_llm": check_streaming_llm,
    "snapkv": check_snapkv,
    "h2o": check_h2o,
    "tova": check_tova,
    "keyformer": check_keyformer,
    "morphkv": check_morphkv,
    "cam": check_cam,
    "knorm": check_knorm,
}
