"""Every evicting row of the method table with the rows it keeps in every form they can have."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    EVICTING,
    Ragged,
    Tokens,
    attend,
    feed,
    new_cache,
    plan_of,
    random_tokens,
    same_state,
    shape_of,
    small_config,
    state_parts,
    worst,
)

from tests.architectures import prompt, tiny
from veloxquant.cache.builder import KVCacheBuilder
from veloxquant.cache.layouts.kept_rows import storage_specs
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.store import Store
from veloxquant.cache.table import MethodRow, held
from veloxquant.config.common_fields import READERS
from veloxquant.config.kv_cache import EVICTION_STORAGE, KVCacheConfig
from veloxquant.config.options import (
    KVzipOptions,
    NestedKVOptions,
    RocketKVOptions,
    StreamingLLMOptions,
)
from veloxquant.core.exceptions import CacheStateError
from veloxquant.methods.kvzip import kvzip_compress
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import WINDOW_STEP

FORMS = [form for form in EVICTION_STORAGE if form != "exact"]
CORE = ("affine4", "turboquant4")
"""Rows take turns with these; the other pairs run with the slow tests."""
every_pair = pytest.mark.parametrize(
    ("row", "form"),
    [
        pytest.param(
            row, form, id=f"{row.name}-{form}",
            marks=() if form == CORE[i % len(CORE)] else pytest.mark.slow,
        )
        for i, row in enumerate(EVICTING)
        for form in FORMS
    ],
)  # fmt: skip

T = 101
SINKS = 4
PACKED_OPTIONS = {
    # Heads compete, so that packed rows change heads.
    NestedKVOptions: NestedKVOptions(nestedkv_budget=32),
    # Pages are short enough that a single query leaves some out.
    RocketKVOptions: RocketKVOptions(rocketkv_obs_window=8, rocketkv_page_size=2),
    StreamingLLMOptions: StreamingLLMOptions(stream_n_sink=SINKS, stream_window_size=32),
}


def packed_config(row: MethodRow, form: str) -> KVCacheConfig:
    config = small_config(row, eviction_storage=form)
    if (options := PACKED_OPTIONS.get(row.options)) is not None:
        return KVCacheConfig(method=row.name, options=options, eviction_storage=form)
    return config


def fed(config: KVCacheConfig, tokens: Tokens, size: int | None = None):
    """A cache that read a prompt and its last token alone."""
    cache = new_cache(config, shape_of(tokens))
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    return cache


def coded(config: KVCacheConfig, tokens: Tokens) -> tuple[mx.array, mx.array]:
    """Keys and values of tokens as packed and unpacked once."""
    specs, out = storage_specs(config), []
    assert specs is not None
    for spec, rows in zip(specs, tokens[1:], strict=True):
        store = Store(codec_for(spec, rows.shape[-1]), WINDOW_STEP)
        store.append(rows)
        out.append(store.decode(0, rows.shape[2], rows.dtype))
    return out[0], out[1]


def test_rows_of_choice_are_those_of_the_methods_that_give_up_tokens() -> None:
    assert READERS["eviction_storage"] == {row.name for row in EVICTING}


# ---- bytes ----------------------------------------------------------------------------------


@every_pair
def test_packed_rows_take_what_the_estimate_says_however_they_came(
    row: MethodRow, form: str
) -> None:
    tokens = random_tokens(T, seed=1, dtype=mx.bfloat16)
    config, shape = packed_config(row, form), shape_of(tokens)
    caches = [fed(config, tokens, size) for size in (7, 64)]
    wanted = held(config, shape, T)
    for cache in caches:
        cache.commit()
        assert cache.size() == wanted.rows < T
        assert cache.nbytes < held(packed_config(row, "exact"), shape, T).nbytes
    states = [state_parts(cache) for cache in caches]
    for name, a in states[0][1].items():
        b = states[1][1][name]
        assert a.shape == b.shape
        # Scores are sums of unpacked rows, which kernels round alike but for the last bit.
        assert worst(a, b) <= (0 if a.dtype == mx.uint32 else 1e-4 * (1 + mx.abs(a).max().item()))
    # A window that moves holds up to a growth step more than its rows.
    slack = shape.n_kv_heads * WINDOW_STEP * 128 if row.name == "streaming_llm" else 0
    assert 0 <= wanted.nbytes - caches[1].nbytes <= slack, (caches[1].nbytes, wanted.nbytes)


# ---- what is held, and what attention makes of it -------------------------------------------


def unchanged(row: MethodRow) -> tuple[bool, bool]:
    """Whether kept keys and values are the fed ones; survivors of cam take over values."""
    return True, row.name != "cam"


def places_of(cache) -> mx.array:
    """Positions of the rows held, (B, H, n); the heads' own, or those of the slots they share."""
    if not hasattr(cache, "kept_positions"):
        first = mx.arange(SINKS, dtype=mx.int32)
        last = mx.arange(cache.offset - cache.size() + SINKS, cache.offset, dtype=mx.int32)
        return mx.broadcast_to(mx.concatenate([first, last]), (1, 2, cache.size()))
    places = cache.kept_positions()
    return mx.broadcast_to(places, (1, 2, places.shape[-1]))


def owners_of(cache) -> mx.array:
    """Head that each held row belongs to, (B, H, n)."""
    own = mx.broadcast_to(mx.arange(2)[:, None], (1, 2, cache.size()))
    if (counts := getattr(cache, "head_rows", None)) is None:
        return own
    pool = (mx.arange(64) >= counts[0, 0]).astype(own.dtype).reshape(1, 2, 32)
    return mx.concatenate([pool, own[:, :, 32:]], axis=-1)


def stored_rows(cache) -> list[mx.array]:
    """Keys and values as the stores give them."""
    cache.commit()
    return [
        mx.concatenate([s.decode(0, s.length, mx.float32) for s in side if s.length], axis=2)
        for side in cache.streams()
    ]


def reference(cache, now: Tokens) -> np.ndarray:
    """Attention of one query with the rows that the stores hold and its own, as it came."""
    batch, n_q, _, dim = now.queries.shape
    held_keys, held_values = (
        np.array(a, dtype=np.float64).reshape(-1, dim) for a in stored_rows(cache)
    )
    owners = np.array(owners_of(cache)).reshape(-1)
    out = np.zeros((batch, n_q, 1, dim))
    for head in range(n_q):
        kv = head // (n_q // 2)
        keys = np.concatenate([held_keys[owners == kv], np.array(now.keys)[0, kv]])
        values = np.concatenate([held_values[owners == kv], np.array(now.values)[0, kv]])
        logits = keys @ np.array(now.queries, dtype=np.float64)[0, head, 0] * dim**-0.5
        weights = np.exp(logits - logits.max())
        out[0, head, 0] = weights @ values / weights.sum()
    return out


@every_pair
def test_kept_rows_are_the_fed_ones_packed_once_and_attention_reads_them(
    row: MethodRow, form: str
) -> None:
    tokens = random_tokens(T, seed=2)
    config = packed_config(row, form)
    cache = fed(config, tokens.cut(0, T - 12))
    for at in range(T - 12, T):
        now = tokens.cut(at, at + 1)
        cache.make_ready(1)
        before = copy.deepcopy(cache)
        out = attend(cache, now)
        if row.name != "rocketkv":
            wanted = reference(before, now)
            assert np.abs(np.array(out) - wanted).max() < 1e-4
    rows, owners, places = stored_rows(cache), owners_of(cache), places_of(cache)
    for side, (got, true) in enumerate(zip(rows, coded(config, tokens), strict=True)):
        if not unchanged(row)[side]:
            continue
        if row.name == "streaming_llm":
            true = mx.concatenate([tokens[1 + side][:, :, :SINKS], true[:, :, SINKS:]], axis=2)
        flat = (owners * T + places).reshape(-1)
        wanted = mx.take(true.reshape(2 * T, -1), flat, axis=0).reshape(got.shape)
        assert worst(got, wanted) < 1e-4


# ---- copies, files, batches, rewinding ------------------------------------------------------


@every_pair
def test_packed_rows_are_batched_saved_and_copied(row: MethodRow, form: str, tmp_path) -> None:
    config = packed_config(row, form)
    rows = [random_tokens(n, seed=n) for n in (60, 33)]
    ragged = Ragged(config, rows)
    ragged.prompt(25)
    step, more = random_tokens(3, seed=4, batch=2), random_tokens(4, seed=5)
    out = feed(ragged.batch, step, 1)
    for i, tokens in enumerate(rows):
        alone = new_cache(config, shape_of(tokens))
        feed(alone, tokens, 25)
        assert worst(out[i : i + 1], feed(alone, step.row(i), 1)) < 1e-5
        save_caches(tmp_path / str(i), [alone], config)
        (back,) = load_caches(tmp_path / str(i), plan_of(shape_of(tokens), 1), config)
        same_state(back, alone)
        twin = copy.deepcopy(alone)
        outs = [feed(cache, more, 1) for cache in (alone, back, twin)]
        assert worst(outs[1], outs[0]) < 1e-5
        assert worst(outs[2], outs[0]) < 1e-5
    other = KVCacheConfig(method=row.name, options=config.options)
    with pytest.raises(CacheStateError, match=f"eviction_storage='{form}', asked for .*'exact'"):
        load_caches(tmp_path / "0", plan_of(shape_of(rows[0]), 1), other)


@every_pair
def test_packed_rows_are_rewound_until_some_are_given_up(row: MethodRow, form: str) -> None:
    tokens, more = random_tokens(90, seed=6), random_tokens(5, seed=7)
    config = KVCacheConfig(method=row.name, eviction_storage=form)
    cache, fresh = new_cache(config, shape_of(tokens)), new_cache(config, shape_of(tokens))
    feed(cache, tokens.cut(0, 45))
    assert cache.trim(7) == 7
    feed(fresh, tokens.cut(0, 38))
    for a, b in zip(stored_rows(cache), stored_rows(fresh), strict=True):
        assert a.shape[2] == 38
        assert worst(a, b) < 1e-5
    assert worst(feed(cache, more, 1), feed(fresh, more, 1)) < 1e-5
    assert sum(s.nbytes for s in cache.stores()) == sum(s.nbytes for s in fresh.stores())
    full = fed(packed_config(row, form), tokens)
    before = copy.deepcopy(full)
    assert not full.is_trimmable()
    assert full.trim(5) == 0
    same_state(full, before)


# ---- models ---------------------------------------------------------------------------------


class Words:
    """A tokenizer of single characters."""

    chat_template = None

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(c) % 50 for c in text]


@pytest.mark.parametrize("form", CORE)
def test_a_model_that_repeats_its_prompt_leaves_packed_rows_as_they_were(form: str) -> None:
    model, ids = tiny("llama"), prompt(90, 1)
    options = KVzipOptions(kvzip_budget=32, kvzip_probe="reconstruct")
    config = KVCacheConfig(method="kvzip", options=options).with_fields(eviction_storage=form)
    caches, full = (KVCacheBuilder.for_model(model, config) for _ in range(2))
    for one in (caches, full):
        mx.eval(model(mx.array([ids]), cache=one))
    kvzip_compress(model, caches, ids, Words())
    for mine, other in zip(caches, full, strict=True):
        assert (mine.offset, mine.size(), other.size()) == (90, 32, 90)
        places = mine.kept_positions()[..., None]
        for got, rows in zip(stored_rows(mine), stored_rows(other), strict=True):
            assert worst(got, mx.take_along_axis(rows, places, axis=2)) < 1e-5
