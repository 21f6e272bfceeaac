"""Layouts of the methods that keep latents, or share them among layers."""

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of
from veloxquant.cache.plans import After, LayerPlan, StreamPlan, WholeBlocks
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import Held, LayerShape
from veloxquant.quantizers.specs.latent import LatentSpec, ScheduledSpec
from veloxquant.quantizers.specs.plain import PlainSpec


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


def palu_held(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
    """The plan of joined rows."""
    groups = palu_groups(config, shape.n_kv_heads)
    return palu_plan(config).held(joined_shape(shape, groups), tokens)


HELD: dict[str, SizeOf] = {**sizes_of({"svdq": svdq_plan}), "palu": palu_held}
