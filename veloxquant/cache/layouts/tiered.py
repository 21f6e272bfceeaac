"""Layouts of the methods that code tokens by class or by age."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of
from veloxquant.cache.plans import (
    Absolute,
    Below,
    LayerPlan,
    StreamPlan,
    Trailing,
    WholeBlocks,
    moves,
)
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import (
    BODY_STEP,
    WINDOW_STEP,
    CodecSpec,
    Held,
    LayerShape,
    round_up,
    store_bytes,
)
from veloxquant.quantizers.specs.affine import AffineChannelSpec
from veloxquant.quantizers.specs.anchored import MAX_ANCHORS, AnchorSpec, ProjectedSpec
from veloxquant.quantizers.specs.plain import PlainSpec
from veloxquant.quantizers.specs.tiered import (
    ClassedSpec,
    NestedChannelSpec,
    NestedTokenSpec,
    PrefixTokenSpec,
    ScaledTokenSpec,
)


@dataclass(frozen=True)
class AgePlan(StreamPlan):
    """Layout `[old][mid][recent][exact]`: tokens pass to an older tier in blocks of the group.

    A block passes when its youngest token has reached the boundary, so a tier may hold up to one
    block more than its boundary says. `spec` is the youngest tier's; `older` holds format and
    boundary of the others, oldest first.
    """

    older: tuple[tuple[CodecSpec, int], ...] = ()

    def rows(self, tokens: int) -> tuple[int, ...]:
        """Tokens in each tier, oldest first, then in the window."""
        ends = [self.schedule.frontier(max(0, tokens - age)) for _, age in self.older]
        ends += [self.schedule.frontier(tokens), tokens]
        return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))

    def tiers(self) -> tuple[tuple[CodecSpec, int], ...]:
        """Format and growth step of each tier, oldest first; only the oldest grows for ever."""
        young = [spec for spec, _ in self.older[1:]] + [self.spec]
        return ((self.older[0][0], BODY_STEP), *((spec, spec.block) for spec in young))

    def fullest(self, tokens: int) -> Iterator[int]:
        """Lengths up to `tokens` among which is the one that takes most bytes."""
        yield from super().fullest(tokens)
        growth = round_up(BODY_STEP, self.spec.block)
        for _, age in self.older:
            for waiting in moves(self.schedule, max(0, tokens - age), growth):
                yield waiting + age

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of one head, growth steps included."""
        *coded, window = self.rows(tokens)
        held = zip(self.tiers(), coded, strict=True)
        return store_bytes(PlainSpec(), window, WINDOW_STEP, dim, itemsize) + sum(
            store_bytes(spec, n, step, dim, itemsize) for (spec, step), n in held
        )


def age_tiered_plan(config: KVCacheConfig) -> LayerPlan:
    """Keys per channel and values per token, at fewer bits the older they are."""
    group = config.age_group_size
    widths = (config.age_bits_recent, config.age_bits_mid, config.age_bits_old)
    ages = (config.age_mid_boundary, config.age_recent_boundary)

    def side(spec: type[NestedChannelSpec] | type[NestedTokenSpec]) -> AgePlan:
        recent, mid, old = (spec(widths[i], group, chain=widths[: i + 1]) for i in range(3))
        older = tuple(zip((old, mid), ages, strict=True))
        return AgePlan(recent, WholeBlocks(group), older=older)

    return LayerPlan(side(NestedChannelSpec), side(NestedTokenSpec))


def zipcache_plan(config: KVCacheConfig) -> LayerPlan:
    """Blocks of four groups in a salient class and the rest; values without groups of tokens."""
    group = config.zipcache_group_size
    size = 4 * group
    salient = round_up(math.ceil(config.zipcache_hi_fraction * size), group)
    counts = (salient, size - salient)
    widths = (config.zipcache_hi_bits, config.zipcache_lo_bits)

    def side(formats: Iterable[CodecSpec]) -> StreamPlan:
        classes = tuple(zip(counts, formats, strict=True))
        return StreamPlan(ClassedSpec(size, classes), WholeBlocks(size))

    keys = side(AffineChannelSpec(width, group) for width in widths)
    if not config.zipcache_quantize_values:
        return LayerPlan(keys, everything(PlainSpec()))
    return LayerPlan(keys, side(ScaledTokenSpec(width, size) for width in widths))


AMC_BLOCK = 64
AMC_TIERS = ((1.0, 8), (0.75, 4), (0.5, 4))
"""Share of channels and bits of each tier, the most salient first."""
AMC_QUERIES = 16
"""Newest tokens whose queries are kept while `amc_use_query_saliency` is on."""


def amc_plan(config: KVCacheConfig) -> LayerPlan:
    """Blocks in three tiers, keys and values each with its own order of channels."""
    high = math.ceil(config.amc_k_high * AMC_BLOCK)
    mid = min(math.ceil(config.amc_k_mid * AMC_BLOCK), AMC_BLOCK - high)
    counts = (high, mid, AMC_BLOCK - high - mid)

    def side(*, pairs: bool) -> StreamPlan:
        group = config.amc_group_size
        tiers = tuple(
            (n, PrefixTokenSpec(bits, group, rank, AMC_BLOCK, pairs))
            for n, (rank, bits) in zip(counts, AMC_TIERS, strict=True)
        )
        return StreamPlan(ClassedSpec(AMC_BLOCK, tiers), WholeBlocks(AMC_BLOCK))

    return LayerPlan(side(pairs=True), side(pairs=False))


def amc_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The plan, and the queries that are kept where saliency reads them."""
    del decoded
    held = amc_plan(config).held(shape, tokens)
    if not config.amc_use_query_saliency:
        return held
    return held.plus(shape.n_q_heads * min(tokens, AMC_QUERIES) * shape.k_dim * shape.itemsize)


@dataclass(frozen=True)
class LedPlan(StreamPlan):
    """A layout whose first block has a lead: places that hold no token."""

    @property
    def lead(self) -> int:
        """Places without a token."""
        assert isinstance(self.spec, AnchorSpec)
        return self.spec.lead

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of one head, growth steps included."""
        sinks, body, window = self.rows(tokens)
        plain = PlainSpec()
        places = body + self.lead if body else 0
        return (
            store_bytes(plain, sinks, max(1, self.n_sink), dim, itemsize)
            + store_bytes(self.spec, places, BODY_STEP, dim, itemsize)
            + store_bytes(plain, window, WINDOW_STEP, dim, itemsize)
        )


ANCHOR_BLOCK = 128
"""Blocks of anchorkv are multiples of this."""
LARGEST_ANCHOR_BLOCK = 4096
ANCHOR_SINKS = 1


def anchorkv_plan(config: KVCacheConfig) -> LayerPlan:
    """The first token, blocks with their anchors, a window; keys and values choose together.

    The first block has no token at its first places, so many that at multiples of a block just the
    window is exact.
    """
    share = config.anchorkv_anchor_frac
    size = min(round_up(math.ceil(1 / share), ANCHOR_BLOCK), LARGEST_ANCHOR_BLOCK)
    anchors = max(1, math.floor(share * size))
    slots = math.floor(config.anchorkv_rho * (size - anchors))
    lead = (ANCHOR_SINKS + config.anchorkv_window) % size

    def side(seed: int, *, owns: bool) -> StreamPlan:
        classes = (
            (slots, ProjectedSpec(config.anchorkv_residual_bits, seed, owns)),
            (size - slots, ProjectedSpec(0, seed, owns)),
        )
        spec = AnchorSpec(size, classes, anchors=anchors, owns=owns, lead=lead)
        # Numbers of anchors reach so far; tokens beyond stay exact.
        limit = MAX_ANCHORS // anchors * size
        blocks = Absolute(lead, Trailing(config.anchorkv_window, size))
        return LedPlan(spec, Below(limit, blocks), ANCHOR_SINKS)

    seed = config.anchorkv_seed
    return LayerPlan(side(seed, owns=True), side(seed + 1, owns=False))


HELD: dict[str, SizeOf] = {
    **sizes_of(
        {"age_tiered": age_tiered_plan, "zipcache": zipcache_plan, "anchorkv": anchorkv_plan}
    ),
    "amc": amc_held,
}
