"""Ranges of the methods that transform, correct or entropy-code whole blocks."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig

CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {}
