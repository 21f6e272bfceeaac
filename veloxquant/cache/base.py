"""The documented home of the configuration, the factory and the builder."""

from veloxquant.cache.builder import KVCacheBuilder, KVCacheFactory
from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig, MethodName

__all__ = ["STANDALONE_METHODS", "KVCacheBuilder", "KVCacheConfig", "KVCacheFactory", "MethodName"]
