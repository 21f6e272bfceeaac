"""Ranges of the methods that compress a prompt once, when it is complete."""

from collections.abc import Callable

from veloxquant.config.checks.eviction import budget_over
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import integer, one_of, real, refuse

PROMPT_WINDOW = 32


def check_pyramidkv(config: KVCacheConfig) -> None:
    """Every layer has room beside sinks and window."""
    sink = integer(config, "pyramid_n_sink", 0)
    least = sink + PROMPT_WINDOW
    budget_over(config, "pyramid_budget", least, "pyramid_n_sink + a window of 32")
    real(config, "pyramid_beta", 1.0, 1e6)
    resolved_budget(config, "pyramid_resolved_budget", least)
    one_of(config, "pyramid_backend", ("auto", "reference", "metal"))


def check_chunkkv(config: KVCacheConfig) -> None:
    """A chunk has room beside window and the chunks of the sinks."""
    sink, size = integer(config, "chunkkv_n_sink", 0), integer(config, "chunkkv_chunk_size", 1)
    least = -(-sink // size) * size + PROMPT_WINDOW + size
    what = "chunkkv_n_sink in whole chunks + a window of 32 + chunkkv_chunk_size"
    budget_over(config, "chunkkv_budget", least, what)
    one_of(config, "chunkkv_score", ("attn_mass", "key_norm", "keydiff"))
    integer(config, "chunkkv_reuse_layers", 1)


def check_nestedkv(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks."""
    budget_over(config, "nestedkv_budget", integer(config, "nestedkv_n_sink", 0), "nestedkv_n_sink")
    integer(config, "nestedkv_window", 1)
    real(config, "nestedkv_beta", 0.0, 1e6)
    real(config, "nestedkv_tau", 0.0, 1.0)
    real(config, "nestedkv_kappa", 0.0, 1e6, open_low=True)
    real(config, "nestedkv_safeguard_alpha", 0.0, 1.0)


def check_squeeze(config: KVCacheConfig) -> None:
    """Every layer has some rows beside sinks."""
    least = integer(config, "squeeze_n_sink", 0) + 8
    budget_over(config, "squeeze_budget", least, "squeeze_n_sink + 8")
    real(config, "squeeze_strength", 0.0, 1.0)
    resolved_budget(config, "squeeze_resolved_budget", least)


def resolved_budget(config: KVCacheConfig, field: str, least: int) -> None:
    """None, or more rows than the `least` that stay in any case."""
    value = getattr(config, field)
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value <= least:
        raise refuse(field, value, f"None or an integer of more than {least}")


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "pyramidkv": check_pyramidkv,
    "chunkkv": check_chunkkv,
    "nestedkv": check_nestedkv,
    "squeeze": check_squeeze,
}
