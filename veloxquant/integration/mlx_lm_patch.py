"""Compressed caches for everything that asks an mlx-lm model for its caches."""

from typing import Any

from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.config.kv_cache import KVCacheConfig


def patch_model_kv_cache(model: Any, config: KVCacheConfig) -> list[Any]:
    """Let `model.make_cache()` give fresh caches of the method, one list a sequence.

    Generation of mlx-lm asks for caches there. Patched again, a model takes the new configuration;
    `del model.make_cache` takes the patch back.

    Args:
        model: a loaded model of mlx-lm.
        config: the method and its settings.

    Returns:
        The first list.

    Raises:
        QuantizerConfigError: when the method cannot serve this model, which stays as it was.
    """
    plan = plan_model(model, config)
    first = new_caches(plan, config)
    model.make_cache = lambda: new_caches(plan, config)
    return first
