"""The layouts of the methods: how each turns its configuration into plans, without MLX.

`HELD` is what the method table and the planner read; the methods build their caches from the same
functions.
"""

from collections.abc import Callable

from veloxquant.cache.plans import (
    PREFILL_CHUNK,
    AtOnce,
    LayerPlan,
    Schedule,
    StreamPlan,
    Trailing,
    WholeBlocks,
    exact_workspace,
    workspace,
)
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.quantizers.sizes import (
    WINDOW_STEP,
    AffineChannelSpec,
    AffineTokenSpec,
    CodebookSpec,
    CodecSpec,
    Held,
    LayerShape,
    PlainSpec,
)

Planner = Callable[[KVCacheConfig], LayerPlan]


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


def turboquant_rvq_plan(config: KVCacheConfig) -> LayerPlan:
    """Every token coded when it arrives; keys with the unbiased norm, values with the best one."""
    bits = width(config)
    return LayerPlan(
        everything(CodebookSpec(bits, config.seed, unbiased=True)),
        everything(CodebookSpec(bits, config.seed + 1, unbiased=False)),
    )


def kivi_plan(config: KVCacheConfig, n_sink: int = 0) -> LayerPlan:
    """Keys per channel in blocks of the residual length, values per token behind a window."""
    bits, group, residual = width(config), config.kivi_group_size, config.residual_length
    keys: Schedule = WholeBlocks(residual)
    return LayerPlan(
        StreamPlan(AffineChannelSpec(bits, group), keys, n_sink),
        StreamPlan(AffineTokenSpec(bits, group), Trailing(residual), n_sink),
    )


def kivi_sink_plan(config: KVCacheConfig) -> LayerPlan:
    """Kivi counted from the first token after the sinks."""
    return kivi_plan(config, config.n_sink_tokens)


PLANS: dict[str, Planner] = {
    BASELINE: fp16_plan,
    "turboquant_rvq": turboquant_rvq_plan,
    "kivi": kivi_plan,
    "kivi_sink": kivi_sink_plan,
}


def planned_held(plan: Planner) -> Callable[[KVCacheConfig, LayerShape, int], Held]:
    """The size function of a method that keeps every token."""

    def size(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
        bits = config.bit_width_inlier
        if not isinstance(bits, list):
            return plan(config).held(shape, tokens)
        each = [plan(config.with_fields(bit_width_inlier=b)).held(shape, tokens) for b in bits]
        mean = sum(h.nbytes for h in each) // len(each)
        return Held(mean, tokens, max(h.peak for h in each), max(h.work for h in each))

    return size


EVICTION_SLACK = WINDOW_STEP
"""Rows by which an evicting store may exceed its budget: its growth step."""
POSITION_BYTES = 4


def kept_held(shape: LayerShape, tokens: int, rows: int, *, positions: bool, prompt: bool) -> Held:
    """Size of a store of `rows` exact rows that grew in small steps.

    `positions` adds a 4-byte position per row and head; with `prompt` the whole prompt is held
    while it is read, so the peak counts all of it.
    """
    capacity = -(-rows // WINDOW_STEP) * WINDOW_STEP
    nbytes = shape.full_bytes(capacity)
    if positions:
        nbytes += shape.n_kv_heads * capacity * POSITION_BYTES
    peak_rows = tokens if prompt else min(tokens, rows + PREFILL_CHUNK)
    room = exact_workspace(shape, peak_rows, PREFILL_CHUNK)
    if rows < tokens and not prompt:
        # Sinks apart from the window are read tile by tile.
        room = max(room, workspace(shape, peak_rows, PREFILL_CHUNK))
    peak = max(nbytes, shape.full_bytes(peak_rows)) + room
    return Held(nbytes, rows, peak, room)


def streaming_llm_held(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
    """Sinks and a recent window, whatever the length."""
    rows = min(tokens, config.stream_n_sink + config.stream_window_size)
    return kept_held(shape, tokens, rows, positions=False, prompt=False)


def snapkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
    """The budget once the prompt of `tokens` tokens was read; decoded tokens add their rows."""
    rows = min(tokens, config.snap_budget)
    return kept_held(shape, tokens, rows, positions=True, prompt=True)


HELD: dict[str, Callable[[KVCacheConfig, LayerShape, int], Held]] = {
    **{name: planned_held(plan) for name, plan in PLANS.items()},
    "streaming_llm": streaming_llm_held,
    "snapkv": snapkv_held,
}
