"""What the mean layer of a model holds, where its layers differ or share."""

from collections import Counter
from collections.abc import Sequence

from veloxquant.allocators.layer_budgets import pyramid_budgets
from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.layouts.eviction_prompt import HELD, PROMPT_WINDOW
from veloxquant.cache.layouts.latent import GROUPS, mean_held, shares_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import Held, LayerShape


def size_in_model(config: KVCacheConfig, n_layers: int) -> SizeOf | None:
    """The size function for a model of so many compressed layers; None where all are alike."""
    if config.method in GROUPS:
        return _sharing(config, n_layers)
    if config.method == "pyramidkv" and config.pyramid_resolved_budget is None and n_layers:
        return _pyramid(config, n_layers)
    return None


def _sharing(config: KVCacheConfig, n_layers: int) -> SizeOf:
    shares = shares_of(config, n_layers)

    def size(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
        del config, decoded
        return mean_held(shares, shape, tokens)

    return size


def pyramid_rows(config: KVCacheConfig, n_layers: int) -> list[int]:
    """The budget of every layer of pyramidkv, first layer first."""
    return pyramid_budgets(
        n_layers, config.pyramid_budget, config.pyramid_n_sink, config.pyramid_beta, PROMPT_WINDOW
    )


def _pyramid(config: KVCacheConfig, n_layers: int) -> SizeOf:
    layers = [
        (config.with_fields(pyramid_resolved_budget=rows), count)
        for rows, count in Counter(pyramid_rows(config, n_layers)).items()
    ]

    def size(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
        del config
        each = [(HELD["pyramidkv"](layer, shape, tokens, decoded), n) for layer, n in layers]
        return _mean(each, n_layers)

    return size


def _mean(each: Sequence[tuple[Held, int]], n_layers: int) -> Held:
    """Sums divided by the layers, rounded up; work is needed once, by the layer that needs most."""

    def mean(sizes: list[int]) -> int:
        total = sum(size * n for size, (_, n) in zip(sizes, each, strict=True))
        return -(-total // n_layers)

    work = max(held.work for held, _ in each)
    resting = mean([held.peak - held.work for held, _ in each])
    return Held(
        mean([held.nbytes for held, _ in each]),
        mean([held.rows for held, _ in each]),
        resting + work,
        work,
        mean([held.above for held, _ in each]),
    )
