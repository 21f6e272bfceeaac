"""Layouts of the methods that transform, correct or entropy-code whole blocks."""

from dataclasses import dataclass

from veloxquant.cache.layouts.base import SizeOf, sizes_of
from veloxquant.cache.plans import After, LayerPlan, StreamPlan, WholeBlocks
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.coded import CorrectedSpec, TransformSpec
from veloxquant.quantizers.specs.plain import PlainSpec

GEAR_GROUPS = 4
"""Groups of keys that share low-rank factors: more factors than that cost too much room."""
KVTC_SINKS = 4
"""First tokens, whose atypical rows would spoil the covariance."""


@dataclass(frozen=True)
class Never:
    """Every token stays exact."""

    def frontier(self, tokens: int) -> int:
        """None."""
        del tokens
        return 0


def gear_plan(config: KVCacheConfig) -> LayerPlan:
    """Blocks of four groups of tokens: keys per channel, values per token, both corrected."""
    bits, group = config.gear_bits, config.gear_group_size
    block = GEAR_GROUPS * group

    def corrected(base: AffineChannelSpec | AffineTokenSpec) -> StreamPlan:
        spec = CorrectedSpec(
            base, block, config.gear_rank, config.gear_energy_threshold,
            config.gear_sparse_fraction,
        )  # fmt: skip
        return StreamPlan(spec, WholeBlocks(block))

    keys = corrected(AffineChannelSpec(bits, group))
    if not config.gear_quantize_values:
        return LayerPlan(keys, StreamPlan(PlainSpec(), Never()))
    return LayerPlan(keys, corrected(AffineTokenSpec(bits, group)))


def kvtc_plan(config: KVCacheConfig) -> LayerPlan:
    """Exact until the basis is fitted, then whole blocks of components behind exact sinks."""
    spec = TransformSpec(config.kvtc_bit_budget, tuple(config.kvtc_bit_choices), config.kvtc_beta)
    stream = StreamPlan(spec, After(spec.fit_tokens, WholeBlocks(spec.block)), KVTC_SINKS)
    return LayerPlan(stream, stream)


HELD: dict[str, SizeOf] = sizes_of({"gear": gear_plan, "kvtc": kvtc_plan})
