"""Sizes of the methods that give up tokens."""

from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.plans import PREFILL_CHUNK, exact_workspace, workspace
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import WINDOW_STEP, Held, LayerShape

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


HELD: dict[str, SizeOf] = {"streaming_llm": streaming_llm_held, "snapkv": snapkv_held}
