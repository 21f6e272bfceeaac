"""Sizes of the methods that give up tokens."""

from dataclasses import dataclass

from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.plans import COMPUTE_ITEMSIZE, PREFILL_CHUNK, exact_workspace, workspace
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import WINDOW_STEP, CodecSpec, Held, LayerShape, round_up
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec

EVICTION_SLACK = WINDOW_STEP
"""Rows by which an evicting store may exceed its budget: its growth step."""
NUMBER_BYTES = 4
SCORED_QUERIES = 256
"""Query rows that a scorer reads at once."""


@dataclass(frozen=True)
class Extra:
    """What a method holds and needs besides its rows.

    `numbers` are 4-byte columns of every row and head (positions apart), `ring` the newest queries
    kept in decode; `whole_prompt` says that a prompt is held whole while it is read, `tiled` that
    attention reads rows tile by tile, and `scored` how many blocks of scores live at once where
    all queries of a prompt are scored.
    """

    numbers: int = 0
    ring: int = 0
    positions: bool = True
    whole_prompt: bool = True
    tiled: bool = False
    scored: int = 0


def kept_held(shape: LayerShape, tokens: int, rows: int, extra: Extra) -> Held:
    """Size of a store of `rows` exact rows that grew in small steps."""
    nbytes = shape.full_bytes(round_up(rows, WINDOW_STEP))
    numbers = extra.numbers + (1 if extra.positions and rows < tokens else 0)
    queries = shape.n_q_heads * shape.k_dim * shape.itemsize
    nbytes += shape.n_kv_heads * rows * numbers * NUMBER_BYTES + min(extra.ring, tokens) * queries
    peak_rows = tokens if extra.whole_prompt else min(tokens, rows + PREFILL_CHUNK)
    room = exact_workspace(shape, peak_rows, PREFILL_CHUNK)
    if rows < tokens and extra.tiled:
        room = max(room, workspace(shape, peak_rows, PREFILL_CHUNK))
    if extra.scored:
        room += _scoring(shape, peak_rows, extra.scored)
    peak = max(nbytes, shape.full_bytes(peak_rows)) + room
    return Held(nbytes, rows, peak, room)


def _scoring(shape: LayerShape, tokens: int, scored: int) -> int:
    """Transient bytes while a block of queries is scored against all rows; measured."""
    block = min(SCORED_QUERIES, tokens)
    waiting = block * shape.n_q_heads * shape.k_dim * shape.itemsize
    scores = shape.n_q_heads * block * tokens * COMPUTE_ITEMSIZE
    return waiting + scored * scores + shape.n_kv_heads * tokens * shape.k_dim * COMPUTE_ITEMSIZE


def streaming_llm_held(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
    """Sinks and a recent window, whatever the length."""
    rows = min(tokens, config.stream_n_sink + config.stream_window_size)
    # Sinks apart from the window are read tile by tile.
    extra = Extra(positions=False, whole_prompt=False, tiled=True)
    return kept_held(shape, tokens, rows, extra)


def budget_held(field: str, extra: Extra | None = None) -> SizeOf:
    """The size function of a method that holds `config.<field>` rows once a prompt was read.

    Where decoded tokens add their rows they are not counted.
    """

    def size(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
        rows = min(tokens, getattr(config, field))
        return kept_held(shape, tokens, rows, extra or Extra())

    return size


def morphkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
    """The budget and the newest queries."""
    rows = min(tokens, config.morphkv_budget)
    return kept_held(shape, tokens, rows, Extra(ring=config.morphkv_window))


def storage_specs(config: KVCacheConfig) -> tuple[CodecSpec, CodecSpec] | None:
    """Forms of kept keys and values, None for rows as they came."""
    match config.eviction_storage:
        case "affine8" | "affine4" as form:
            spec = AffineTokenSpec(int(form.removeprefix("affine")), STORAGE_GROUP)
            return spec, spec
        case "turboquant4":
            return (
                CodebookSpec(4, config.seed, unbiased=True),
                CodebookSpec(4, config.seed + 1, unbiased=False),
            )
        case _:
            return None


def stored(size: SizeOf) -> SizeOf:
    """The same method with its rows in the form of `eviction_storage`."""

    def packed(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
        held = size(config, shape, tokens)
        if (specs := storage_specs(config)) is None or not held.rows:
            return held
        capacity = round_up(held.rows, WINDOW_STEP)
        exact = shape.full_bytes(capacity)
        rows = shape.n_kv_heads * sum(
            spec.nbytes(capacity, dim, shape.itemsize)
            for spec, dim in zip(specs, (shape.k_dim, shape.v_dim), strict=True)
        )
        nbytes = held.nbytes - exact + rows
        work = max(held.work, workspace(shape, tokens, PREFILL_CHUNK))
        return Held(nbytes, held.rows, (held.peak - held.work) * rows // exact + work, work)

    return packed


STORAGE_GROUP = 32
"""Channels that share a scale where kept rows are packed."""
SCORED = Extra(numbers=1, scored=3)
HELD: dict[str, SizeOf] = {
    "streaming_llm": streaming_llm_held,
    "snapkv": stored(budget_held("snap_budget")),
    "h2o": stored(budget_held("h2o_budget", SCORED)),
    "tova": stored(budget_held("tova_budget", Extra(ring=1))),
    "keyformer": stored(budget_held("keyformer_budget", Extra(numbers=1, scored=5))),
    "morphkv": stored(morphkv_held),
    "cam": budget_held("cam_budget", SCORED),
    "knorm": stored(budget_held("knorm_budget", Extra(numbers=1, whole_prompt=False))),
}
