"""The baseline."""

from collections.abc import Callable

from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.config.ranges import NO_OUTLIERS, unused


def check_fp16(config: KVCacheConfig) -> None:
    """The baseline takes no setting of a codec."""
    unused(config, NO_OUTLIERS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {BASELINE: check_fp16}
