"""The baseline: it takes no setting of a codec, which `config.common_fields` knows."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig

CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {}
