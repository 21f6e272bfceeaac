"""Ranges of the methods that code vectors by codebooks of vectors."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig

CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {}
