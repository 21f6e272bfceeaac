"""What layouts share: whole streams in one form, bits of a layer, the size of a plan."""

from collections.abc import Callable
from typing import Protocol

from veloxquant.cache.plans import AtOnce, LayerPlan, StreamPlan
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.quantizers.sizes import CodecSpec, Held, LayerShape
from veloxquant.quantizers.specs.plain import PlainSpec

Planner = Callable[[KVCacheConfig], LayerPlan]


class SizeOf(Protocol):
    """What one layer holds of one sequence, by method."""

    def __call__(
        self, config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0
    ) -> Held:
        """Size at `tokens` tokens, the last `decoded` of which came one by one.

        Most methods hold the same either way; those that compress a prompt once keep what is
        decoded.
        """
        ...


def width(config: KVCacheConfig) -> int:
    """Bits of this layer; a per-layer list counts by its mean, rounded up."""
    bits = config.bit_width_inlier
    return -(-sum(bits) // len(bits)) if isinstance(bits, list) else bits


def everything(spec: CodecSpec) -> StreamPlan:
    """Every token in one form."""
    return StreamPlan(spec, AtOnce())


def fp16_plan(config: KVCacheConfig) -> LayerPlan:
    """Rows as the model made them."""
    return LayerPlan(everything(PlainSpec()), everything(PlainSpec()))


def planned_held(plan: Planner) -> SizeOf:
    """The size function of a method that keeps every token."""

    def size(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
        del decoded
        bits = config.bit_width_inlier
        if not isinstance(bits, list):
            return plan(config).held(shape, tokens)
        each = [plan(config.with_fields(bit_width_inlier=b)).held(shape, tokens) for b in bits]
        mean = sum(h.nbytes for h in each) // len(each)
        most = sum(h.most for h in each) // len(each)
        work = max(h.work for h in each)
        return Held(mean, tokens, max(h.peak for h in each), work, most - mean)

    return size


def sizes_of(plans: dict[str, Planner]) -> dict[str, SizeOf]:
    """Size functions of several methods that keep every token."""
    return {name: planned_held(plan) for name, plan in plans.items()}


HELD: dict[str, SizeOf] = sizes_of({BASELINE: fp16_plan})
