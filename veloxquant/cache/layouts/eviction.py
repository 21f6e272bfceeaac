"""Sizes of the methods that give up tokens."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.layouts.kept_rows import KeptRows
from veloxquant.cache.plans import COMPUTE_ITEMSIZE, PREFILL_CHUNK
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import WINDOW_STEP, Held, LayerShape

NUMBER_BYTES = 4
SCORED_QUERIES = 256
"""Query rows that a scorer reads at once."""


@dataclass(frozen=True)
class Extra:
    """What a method holds and needs besides its rows.

    `numbers` are 4-byte columns of every row and head, `positions` says who has a list of places
    once rows were given up, `ring` are the newest queries kept in decode, `window` those kept while
    a prompt is read; `whole_prompt` says that a prompt is held whole until then, `tiled` that
    attention reads exact rows tile by tile, `rated` that all keys are rated in fp32 at once, and
    `scored` how many blocks of scores live at once where all queries of a prompt are scored.
    """

    numbers: int = 0
    ring: int = 0
    window: int = 0
    positions: Literal["head", "layer", "nobody"] = "head"
    whole_prompt: bool = True
    tiled: bool = False
    rated: bool = False
    scored: int = 0


def kept_held(
    config: KVCacheConfig, shape: LayerShape, tokens: int, rows: int, extra: Extra
) -> Held:
    """Size of a store of `rows` rows, in the form asked for, that grew in small steps."""
    form = KeptRows.of(config, shape)
    nbytes = form.nbytes(rows)
    lists = {"head": shape.n_kv_heads, "layer": 1, "nobody": 0}[extra.positions]
    numbers = extra.numbers * shape.n_kv_heads + (lists if rows < tokens else 0)
    queries = shape.n_q_heads * shape.k_dim * shape.itemsize
    nbytes += rows * numbers * NUMBER_BYTES + min(extra.ring, tokens) * queries
    peak_rows = tokens if extra.whole_prompt else min(tokens, rows + PREFILL_CHUNK)
    waiting = max(extra.ring, extra.window, SCORED_QUERIES if extra.scored else 0)
    reading = form.nbytes(peak_rows) + min(waiting, tokens) * queries
    reading += peak_rows * extra.numbers * shape.n_kv_heads * NUMBER_BYTES
    room = form.work(peak_rows, tiled=extra.tiled and rows < tokens)
    if extra.rated:
        room += shape.n_kv_heads * peak_rows * shape.k_dim * COMPUTE_ITEMSIZE
    if extra.scored:
        room += _scoring(shape, peak_rows, extra.scored)
    peak = max(nbytes, reading) + room
    return Held(nbytes, rows, peak, room)


def _scoring(shape: LayerShape, tokens: int, scored: int) -> int:
    """Transient bytes while a block of queries is scored against all rows; measured."""
    scores = shape.n_q_heads * min(SCORED_QUERIES, tokens) * tokens * COMPUTE_ITEMSIZE
    return scored * scores + shape.n_kv_heads * tokens * shape.k_dim * COMPUTE_ITEMSIZE


def streaming_llm_held(
    config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0
) -> Held:
    """Exact sinks and a recent window, whatever the length.

    They are apart where the window is packed or has moved; then it holds up to a growth step more.
    """
    del decoded
    sinks = min(tokens, config.stream_n_sink)
    window = min(tokens - sinks, config.stream_window_size)
    rows = sinks + window
    # Sinks apart from the window are read tile by tile.
    extra = Extra(positions="nobody", whole_prompt=False, tiled=True)
    held = kept_held(config, shape, tokens, rows, extra)
    form = KeptRows.of(config, shape)
    if form.is_exact and rows == tokens:
        return held
    moving = form.at_peak(WINDOW_STEP) if rows < tokens else 0
    apart = shape.full_bytes(config.stream_n_sink if sinks else 0)
    return held._replace(nbytes=apart + form.nbytes(window) + moving, peak=held.peak + apart)


def one_more(config: KVCacheConfig, held: Held, shape: LayerShape) -> Held:
    """Between two steps a row beyond the budget waits for its score to be compared."""
    form = KeptRows.of(config, shape)
    return held._replace(above=held.above + form.nbytes(held.rows + 1) - form.nbytes(held.rows))


def answers_add(size: SizeOf) -> SizeOf:
    """The size of a method that compresses a prompt once and keeps what is decoded.

    Its most is that of any answer up to the one planned for: a shorter one may be the first to
    need lists of positions. Where a prompt's last piece is a single token, that one is taken for
    the end, and the next adds its row.
    """

    def most(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
        held = size(config, shape, tokens, decoded)
        if held.rows < tokens:
            other = size(config, shape, tokens + 1, decoded + 1)
        else:
            # Less than the whole is kept of a long prompt, so for short answers.
            answers = range(decoded + 1)
            short = bisect_left(
                answers, 1, key=lambda n: size(config, shape, tokens, n).rows == tokens
            )
            if not short:
                return held
            other = size(config, shape, tokens, short - 1)
        above = max(held.above, other.most - held.nbytes)
        return held._replace(above=above, peak=max(held.peak, held.nbytes + above))

    return most


def budget_held(
    field: str,
    extra: Extra | None = None,
    *,
    window: str = "",
    adds: bool = False,
    waits: bool = False,
) -> SizeOf:
    """The size function of a method that holds `config.<field>` rows once a prompt was read.

    `window` names the setting of how many queries the end of a prompt looks at. `adds`: decoded
    tokens add their rows, where else each takes the place of another. `waits`: the newest may be
    the one that goes, once the next one comes.
    """

    def size(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
        more = decoded if adds else 0
        rows = min(tokens - more, getattr(config, field)) + more
        own = extra or Extra(window=getattr(config, window) if window else 0)
        held = kept_held(config, shape, tokens, rows, own)
        return one_more(config, held, shape) if waits and rows < tokens else held

    return answers_add(size) if adds else size


def morphkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """The budget and the newest queries."""
    del decoded
    rows = min(tokens, config.morphkv_budget)
    return kept_held(config, shape, tokens, rows, Extra(ring=config.morphkv_window))


SCORED = Extra(numbers=1, scored=3)
RATED = Extra(numbers=1, whole_prompt=False, rated=True)
HELD: dict[str, SizeOf] = {
    "streaming_llm": streaming_llm_held,
    "snapkv": budget_held("snap_budget", window="snap_obs_window", adds=True),
    "h2o": budget_held("h2o_budget", SCORED),
    "tova": budget_held("tova_budget", Extra(ring=1, positions="layer")),
    "keyformer": budget_held("keyformer_budget", Extra(numbers=1, scored=5)),
    "morphkv": morphkv_held,
    "cam": budget_held("cam_budget", SCORED),
    "knorm": budget_held("knorm_budget", RATED, waits=True),
}
