"""Sizes of the methods that compress a prompt once, when it is complete.

Decoded tokens add their rows, but for squeeze.
"""

from typing import NamedTuple

from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.layouts.eviction import NUMBER_BYTES, Extra, answers_add, kept_held
from veloxquant.cache.layouts.kept_rows import KeptRows
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import WINDOW_STEP, Held, LayerShape

PROMPT_WINDOW = 32
"""Newest rows whose queries choose, and which stay, where no setting says how many."""
SQUEEZE_ROOM = 8
"""Rows that squeeze leaves every layer beside its sinks."""
SCORING_COPIES = 5
"""Keys, directions and means in fp32 while anomalies are computed."""


def pyramidkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The mean over layers; between the least and the largest budget a little too much."""
    budget = config.pyramid_resolved_budget or config.pyramid_budget
    rows = min(tokens - decoded, budget) + decoded
    return kept_held(config, shape, tokens, rows, Extra(window=PROMPT_WINDOW))


class ChunkRule(NamedTuple):
    """Which rows are whole chunks, which ones stay in any case.

    Chunks of `size` start at row 0. Those that hold one of the first `n_sink` rows stay, as do the
    last `n_recent` rows and the rows before them that fill no chunk.
    """

    size: int
    n_sink: int
    n_recent: int

    @property
    def first(self) -> int:
        """First row of the first chunk that may go."""
        return -(-self.n_sink // self.size) * self.size

    def tail(self, rows: int) -> int:
        """Rows before the recent ones that fill no chunk."""
        return (rows - self.n_recent) % self.size

    def chunks(self, rows: int, budget: int) -> int:
        """Chunks that fit the budget beside what stays in any case."""
        return (budget - self.n_recent - self.first - self.tail(rows)) // self.size

    def kept(self, rows: int, budget: int) -> int:
        """Rows that stay: all of them, or less than one chunk short of the budget."""
        if rows <= budget:
            return rows
        free = self.chunks(rows, budget) * self.size
        return self.first + free + self.tail(rows) + self.n_recent


def chunk_rule(config: KVCacheConfig) -> ChunkRule:
    """The chunks of chunkkv."""
    return ChunkRule(config.chunkkv_chunk_size, config.chunkkv_n_sink, PROMPT_WINDOW)


def chunkkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """Whole chunks within the budget; one list of positions for all heads."""
    prompt, budget = tokens - decoded, config.chunkkv_budget
    rows = chunk_rule(config).kept(prompt, budget) + decoded
    extra = Extra(positions="layer", window=PROMPT_WINDOW)
    held = kept_held(config, shape, tokens, rows, extra)
    fullest = kept_held(config, shape, tokens, min(prompt, budget) + decoded, extra)
    return held._replace(above=fullest.nbytes - held.nbytes)


def heads_compete(config: KVCacheConfig, shape: LayerShape) -> bool:
    """Whether heads of nestedkv share rows unequally, where attention goes through the hook."""
    safe = int(config.nestedkv_safeguard_alpha * config.nestedkv_budget)
    return shape.n_kv_heads > 1 and safe < config.nestedkv_budget


def nestedkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The mean over heads, their counts; scoring takes some fp32 copies of all keys."""
    rows = min(tokens - decoded, config.nestedkv_budget) + decoded
    held = kept_held(config, shape, tokens, rows, Extra())
    unequal = rows < tokens and heads_compete(config, shape)
    counts = NUMBER_BYTES * shape.n_kv_heads if unequal else 0
    scoring = SCORING_COPIES * NUMBER_BYTES * shape.n_kv_heads * tokens * shape.k_dim
    form = KeptRows.of(config, shape)
    resting = form.at_peak(tokens) + form.unpacked(tokens)
    return held._replace(
        nbytes=held.nbytes + counts, peak=max(held.peak + counts, resting + scoring)
    )


def squeeze_least(config: KVCacheConfig) -> int:
    """Rows up to which no layer's budget can matter."""
    part = 1.0 - 0.7 * config.squeeze_strength
    return max(config.squeeze_n_sink + SQUEEZE_ROOM, int(part * config.squeeze_budget))


def squeeze_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The mean over layers; the newest queries until budgets are known.

    Once they are known, decoded tokens take the places of others.
    """
    del decoded
    given = config.squeeze_resolved_budget
    waits = given is None and tokens <= squeeze_least(config)
    ring = PROMPT_WINDOW if waits else 0
    window = PROMPT_WINDOW if given is None else 0
    extra = Extra(ring=ring, window=window, positions="layer", whole_prompt=given is None)
    held = kept_held(config, shape, tokens, min(tokens, given or config.squeeze_budget), extra)
    if waits or given is not None:
        return held
    waiting = squeeze_held(config, shape, squeeze_least(config))
    # Every layer has its own budget, a store that grew by whole steps, and positions once it gave
    # up rows, as it does of one token more.
    rows = min(tokens, held.rows + WINDOW_STEP - 1)
    fullest = kept_held(config, shape, tokens + 1, rows, extra)
    above, peak = max(fullest.nbytes, waiting.nbytes) - held.nbytes, max(held.peak, waiting.peak)
    return held._replace(above=above, peak=peak)


HELD: dict[str, SizeOf] = {
    "pyramidkv": answers_add(pyramidkv_held),
    "chunkkv": answers_add(chunkkv_held),
    "nestedkv": answers_add(nestedkv_held),
    "squeeze": squeeze_held,
}
