"""Layouts of the methods that keep latents, or share them among layers."""

from collections import Counter
from collections.abc import Callable
from math import ceil

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of
from veloxquant.cache.plans import (
    PREFILL_CHUNK,
    After,
    Below,
    LayerPlan,
    StreamPlan,
    Trailing,
    WholeBlocks,
    workspace,
)
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import Held, LayerShape
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.latent import LatentSpec, ScheduledSpec
from veloxquant.quantizers.specs.plain import PlainSpec
from veloxquant.quantizers.specs.shared import MergedSpec, SharedCodesSpec, SharedLatentsSpec


def svdq_plan(config: KVCacheConfig) -> LayerPlan:
    """Keys exact until the basis is fitted, then blocks of latents; values exact."""
    spec = ScheduledSpec(
        config.svdq_rank, config.svdq_energy_threshold, tuple(config.svdq_bit_schedule),
        config.svdq_group_size,
    )  # fmt: skip
    keys = StreamPlan(spec, After(spec.fit_tokens, WholeBlocks(spec.block)))
    return LayerPlan(keys, everything(PlainSpec()))


def palu_groups(config: KVCacheConfig, n_kv_heads: int) -> int:
    """Groups of KV heads: the most that are asked for and that hold equally many."""
    wanted = min(config.palu_n_head_groups, n_kv_heads)
    return next(n for n in range(wanted, 0, -1) if n_kv_heads % n == 0)


def palu_plan(config: KVCacheConfig) -> LayerPlan:
    """Joined rows, exact until the basis is fitted, then latents token by token."""
    spec = LatentSpec(
        config.palu_rank, config.palu_energy_threshold, config.palu_hi_bit, config.palu_lo_bit,
        config.palu_hi_fraction, config.palu_group_size,
    )  # fmt: skip
    latents = StreamPlan(spec, After(spec.fit_tokens, WholeBlocks(spec.block)))
    return LayerPlan(latents, latents if config.palu_quantize_values else everything(PlainSpec()))


def joined_shape(shape: LayerShape, groups: int) -> LayerShape:
    """The shape of a layer whose KV heads are joined to `groups` long ones."""
    size = shape.n_kv_heads // groups
    return shape._replace(n_kv_heads=groups, k_dim=size * shape.k_dim, v_dim=size * shape.v_dim)


def palu_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The plan of joined rows."""
    del decoded
    groups = palu_groups(config, shape.n_kv_heads)
    return palu_plan(config).held(joined_shape(shape, groups), tokens)


# ---- layers that share -----------------------------------------------------------------------

XKV_SAMPLE = 512
MINICACHE_SINKS = 4
"""First tokens, which are always kept as they are."""


def chunks(layers: range, size: int) -> list[tuple[int, ...]]:
    """Consecutive layers, `size` at a time; the last group may be smaller."""
    return [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]


def xquant_groups(config: KVCacheConfig, n_layers: int) -> list[tuple[int, ...]]:
    """Layers that share codes."""
    return chunks(range(n_layers), config.xquant_group_size)


def xquant_plan(config: KVCacheConfig, index: int = 0, size: int = 1) -> LayerPlan:
    """Keys per channel and values per token behind a window of one group of tokens."""
    group, base = config.xquant_group_quant_size, config.xquant_base_bits

    def side(kind: type[AffineChannelSpec] | type[AffineTokenSpec]) -> StreamPlan:
        spec = SharedCodesSpec(
            kind(base, group), config.xquant_residual_bits, index=index, size=size
        )
        return StreamPlan(spec, Trailing(group, group))

    return LayerPlan(side(AffineChannelSpec), side(AffineTokenSpec))


def minicache_groups(config: KVCacheConfig, n_layers: int) -> list[tuple[int, ...]]:
    """Pairs of the deeper layers; the others stay alone."""
    start = ceil(config.minicache_start_frac * n_layers)
    alone = [(i,) for i in range(start)]
    return alone + chunks(range(start, n_layers), config.minicache_group_size)


def minicache_plan(config: KVCacheConfig, index: int = 0, size: int = 1) -> LayerPlan:
    """Exact rows for a layer by itself; else blocks of merged tokens behind sinks."""
    if size == 1 or config.minicache_retention_threshold >= 1:
        return LayerPlan(everything(PlainSpec()), everything(PlainSpec()))
    spec = MergedSpec(
        config.minicache_retention_threshold, config.minicache_slerp_t, index=index, size=size
    )
    limit = config.minicache_max_ctx // spec.block * spec.block
    stream = StreamPlan(spec, Below(limit, WholeBlocks(spec.block)), MINICACHE_SINKS)
    return LayerPlan(stream, stream)


def minicache_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """A layer by itself: exact rows that are read tile by tile, as packed ones are."""
    del decoded
    nbytes = minicache_plan(config).nbytes(shape, tokens)
    work = workspace(shape, tokens, PREFILL_CHUNK)
    return Held(nbytes, tokens, nbytes + work, work)


def xkv_groups(config: KVCacheConfig, n_layers: int) -> list[tuple[int, ...]]:
    """Layers that share latents."""
    return chunks(range(n_layers), config.xkv_group_size)


def xkv_plan(config: KVCacheConfig, index: int = 0, size: int = 1) -> LayerPlan:
    """Exact until the joint basis is fitted, then blocks of joint latents."""
    width = config.xkv_latent_bits
    latents = LatentSpec(
        config.xkv_rank, config.xkv_energy_threshold, width, width, 1.0,
        config.xkv_group_quant_size, XKV_SAMPLE,
    )  # fmt: skip
    spec = SharedLatentsSpec(latents, index=index, size=size)
    limit = config.xkv_max_ctx // spec.block * spec.block
    stream = StreamPlan(spec, Below(limit, After(spec.fit_tokens, WholeBlocks(spec.block))))
    return LayerPlan(stream, stream)


GROUPS: dict[str, Callable[[KVCacheConfig, int], list[tuple[int, ...]]]] = {
    "xquant": xquant_groups,
    "minicache": minicache_groups,
    "xkv": xkv_groups,
}
"""Layers of a model of so many compressed layers that share; each layer is in one group."""
PLANS: dict[str, Callable[[KVCacheConfig, int, int], LayerPlan]] = {
    "xquant": xquant_plan,
    "minicache": minicache_plan,
    "xkv": xkv_plan,
}


Shares = tuple[tuple[LayerPlan, int], ...]


def shares_of(config: KVCacheConfig, n_layers: int) -> Shares:
    """Plans of the layers of a model, and how many layers have each."""
    places = Counter(
        (index, len(layers))
        for layers in GROUPS[config.method](config, n_layers)
        for index in range(len(layers))
    )
    return tuple((PLANS[config.method](config, *place), n) for place, n in places.items())


def mean_held(shares: Shares, shape: LayerShape, tokens: int) -> Held:
    """What a layer holds on average in a model whose layers share as they should."""
    each = [(plan.held(shape, tokens), n) for plan, n in shares]
    nbytes = -(-sum(h.nbytes * n for h, n in each) // sum(n for _, n in each))
    most = -(-sum(h.most * n for h, n in each) // sum(n for _, n in each))
    work = max(h.work for h, _ in each)
    return Held(nbytes, tokens, most + work, work, most - nbytes)


HELD: dict[str, SizeOf] = {
    **sizes_of(
        {
            "svdq": svdq_plan,
            "xquant": xquant_plan,
            "xkv": xkv_plan,
        }
    ),
    "minicache": minicache_held,
    "palu": palu_held,
}
"""A layer by itself; for layers that share see `mean_held`."""
