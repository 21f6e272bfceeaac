"""Ranges of the methods that code tokens by class or by age."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig

CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {}
