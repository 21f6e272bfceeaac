"""Every ready row of the method table through one protocol; no method is named here."""

import copy
import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    EVICTING,
    KEEPING,
    NAMES,
    READY,
    Ragged,
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    plan_of,
    random_tokens,
    roomy_config,
    same,
    same_state,
    shape_of,
    small_config,
    state_parts,
    worst,
)

from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.table import MethodRow, held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import VecInferOptions
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.quantizers.sizes import WINDOW_STEP

T = 150
every_row = pytest.mark.parametrize("row", READY, ids=NAMES)
keeping_rows = pytest.mark.parametrize("row", KEEPING, ids=[r.name for r in KEEPING])
evicting_rows = pytest.mark.parametrize("row", EVICTING, ids=[r.name for r in EVICTING])


def small(row: MethodRow, tokens: Tokens, **fields: Any) -> Any:
    return new_cache(small_config(row, **fields), shape_of(tokens))


def fed(row: MethodRow, tokens: Tokens, size: int | None = None) -> Any:
    cache = small(row, tokens)
    feed(cache, tokens, size)
    return cache


def sizes(row: MethodRow) -> tuple[int | None, ...]:
    """Piece sizes; a lone token would end the prompt of a method that reads queries."""
    return (1, 7, 64, None) if row.queries == "none" else (7, 64, None)


def reference(queries: mx.array, keys: mx.array, values: mx.array) -> np.ndarray:
    """Attention of the newest queries with all rows, in float64."""
    q, k, v = (np.array(a.astype(mx.float32), dtype=np.float64) for a in (queries, keys, values))
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    logits = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    n, total = q.shape[2], k.shape[2]
    logits[..., ~np.tril(np.ones((n, total), dtype=bool), total - n)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def close(got: mx.array, want: np.ndarray, tolerance: float = 1e-4) -> None:
    assert got.shape == want.shape
    difference = np.abs(np.array(got.astype(mx.float32), dtype=np.float64) - want).max(initial=0)
    assert difference <= tolerance * max(1.0, np.abs(want).max(initial=0)), difference


def counters(cache: Any) -> dict[str, Any]:
    """Documented counters: properties named for bytes or tokens."""
    names = [
        name
        for name in dir(type(cache))
        if isinstance(getattr(type(cache), name, None), property)
        and (name.endswith("_bytes") or name.startswith("tokens_"))
    ]
    return {name: getattr(cache, name) for name in names}


# ---- how tokens arrive ----------------------------------------------------------------------


@every_row
def test_state_does_not_depend_on_the_pieces_of_the_prompt(row: MethodRow) -> None:
    tokens, last = random_tokens(T, seed=1), random_tokens(3, seed=2)
    states = []
    for size in sizes(row):
        cache = fed(row, tokens, size)
        feed(cache, last, 1)
        states.append(cache)
    for other in states[1:]:
        same_state(states[0], other)


@every_row
def test_a_first_call_of_one_token(row: MethodRow) -> None:
    tokens = random_tokens(40, seed=3)
    cache = small(row, tokens)
    first = attend(cache, tokens.cut(0, 1))
    assert worst(first, mx.repeat(tokens.values[:, :, :1], 2, axis=1)) < 1e-5
    feed(cache, tokens.cut(1, 40))
    assert cache.offset == 40


@every_row
def test_an_empty_append_changes_nothing(row: MethodRow) -> None:
    tokens = random_tokens(50, seed=4)
    cache = small(row, tokens)
    assert attend(cache, tokens.cut(0, 0)).shape == (1, 4, 0, 64)
    assert cache.offset == 0
    feed(cache, tokens)
    assert attend(cache, tokens.cut(0, 0)).shape == (1, 4, 0, 64)
    assert cache.offset == 50
    same_state(cache, fed(row, tokens))


@every_row
def test_future_tokens_do_not_reach_the_past(row: MethodRow) -> None:
    tokens, change = random_tokens(90, seed=5), random_tokens(20, seed=6)
    other = tokens.cut(0, 70).then(change)
    for size in (None, 35):
        a = feed(small(row, tokens), tokens, size)
        b = feed(small(row, other), other, size)
        assert worst(a[:, :, :70], b[:, :, :70]) <= 1e-5, size
        assert worst(a[:, :, 70:], b[:, :, 70:]) > 1e-3, size


# ---- shapes and types -----------------------------------------------------------------------


@every_row
@pytest.mark.parametrize(
    ("k_dim", "v_dim"),
    [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)],
)
def test_attention_reads_what_is_held_for_every_head_size(
    row: MethodRow, k_dim: int, v_dim: int
) -> None:
    tokens = random_tokens(T, seed=7, heads=1, k_dim=k_dim, v_dim=v_dim)
    cache = small(row, tokens)
    feed(cache, tokens.cut(0, T - 3), 50)
    for at in (T - 3, T - 2, T - 1):
        now = tokens.cut(at, at + 1)
        out = attend(cache, now)
        close(out, reference(now.queries, *held_rows(cache)))


@every_row
@pytest.mark.parametrize("repeat", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_grouped_queries_read_their_own_head(row: MethodRow, repeat: int, length: int) -> None:
    tokens = random_tokens(60 + length, seed=8, heads=3, repeat=repeat)
    cache = small(row, tokens)
    feed(cache, tokens.cut(0, 60))
    now = tokens.cut(60, 60 + length)
    out = attend(cache, now)
    close(out, reference(now.queries, *held_rows(cache)))


@every_row
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_types_out_are_the_types_in(row: MethodRow, dtype: mx.Dtype) -> None:
    tokens = random_tokens(70, seed=9, heads=1, dtype=dtype)
    cache = small(row, tokens)
    out = feed(cache, tokens.cut(0, 69), 23)
    step = attend(cache, tokens.cut(69, 70))
    assert out.dtype == step.dtype == dtype
    assert all(a.dtype == dtype for a in held_rows(cache))
    close(step, reference(tokens.queries[:, :, 69:], *held_rows(cache)), 2e-2)


@every_row
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_large_norms_stay_finite(row: MethodRow, dtype: mx.Dtype) -> None:
    tokens = random_tokens(70, seed=10, heads=1, dtype=dtype, factor=30_000.0)
    assert mx.linalg.norm(tokens.values.astype(mx.float32), axis=-1).min().item() > 65504
    cache = small(row, tokens)
    out = feed(cache, tokens, 23)
    bound = 1.5 * mx.linalg.norm(tokens.values.astype(mx.float32), axis=-1).max().item()
    assert mx.isfinite(out).all().item()
    assert mx.abs(out).max().item() <= bound
    assert all(mx.isfinite(a).all().item() for a in held_rows(cache))


@every_row
def test_zeros_give_zeros(row: MethodRow) -> None:
    zeros = Tokens(*(mx.zeros_like(a) for a in random_tokens(T)))
    cache = small(row, zeros)
    out = feed(cache, zeros, 40)
    assert not mx.abs(out).max().item()
    assert not any(mx.abs(a).max().item() for a in held_rows(cache))


# ---- rewinding ------------------------------------------------------------------------------

CUTS = (0, 1, 22, 37, 86, T)


@pytest.mark.parametrize("n", CUTS)
@pytest.mark.parametrize("row", [r for r in KEEPING if r.trim == "exact"], ids=lambda r: r.name)
def test_an_exact_trim_leaves_the_state_of_the_kept_tokens(row: MethodRow, n: int) -> None:
    tokens, more = random_tokens(T, seed=11), random_tokens(60, seed=12)
    cache = fed(row, tokens)
    assert cache.trim(n) == n
    kept = tokens.cut(0, T - n)
    if n < T:
        same_state(cache, fed(row, kept))
    feed(cache, more, 9)
    same_state(cache, fed(row, kept.then(more), 9))


@pytest.mark.parametrize("n", CUTS)
@pytest.mark.parametrize("row", [r for r in KEEPING if r.trim == "lossy"], ids=lambda r: r.name)
def test_a_lossy_trim_leaves_the_frontiers_of_the_kept_tokens(row: MethodRow, n: int) -> None:
    tokens, more = random_tokens(T, seed=13), random_tokens(60, seed=14)
    cache, kept = fed(row, tokens), tokens.cut(0, T - n)
    cache.commit()
    coded = [worst(a, b) for a, b in zip(held_rows(cache), tokens[1:], strict=True)]
    assert cache.trim(n) == n
    assert cache.offset == T - n
    for extra in (None, more):
        if extra is not None:
            feed(cache, extra, 9)
            kept = kept.then(extra)
        elif n == T:
            continue
        fresh = fed(row, kept, 9)
        tree, arrays = state_parts(cache)
        wanted, fresh_arrays = state_parts(fresh)
        assert tree == wanted
        assert {p: a.shape for p, a in arrays.items()} == {
            p: a.shape for p, a in fresh_arrays.items()
        }
        assert counters(cache) == counters(fresh)
        for now, true, error in zip(held_rows(cache), kept[1:], coded, strict=True):
            # Tokens coded twice may lose twice; other tokens of their group may widen the grid.
            assert worst(now, true) <= (1 if extra is None else 3) * error + 1e-5


@evicting_rows
@pytest.mark.parametrize("n", CUTS)
def test_an_evicting_method_rewinds_exactly_before_it_evicts(row: MethodRow, n: int) -> None:
    tokens, more = random_tokens(T, seed=15), random_tokens(60, seed=16)
    config, shape = roomy_config(row), shape_of(tokens)
    cache, fresh = new_cache(config, shape), new_cache(config, shape)
    feed(cache, tokens)
    assert cache.is_trimmable()
    assert cache.trim(n) == n
    kept = tokens.cut(0, T - n)
    assert cache.offset == cache.size() == T - n
    if n < T:
        feed(fresh, kept)
        for a, b in zip(held_rows(cache), held_rows(fresh), strict=True):
            assert same(a, b)
    assert worst(feed(cache, more, 9), feed(fresh, more, 9)) < 1e-6
    assert counters(cache) == counters(fresh)


@evicting_rows
def test_nothing_is_rewound_after_an_eviction(row: MethodRow) -> None:
    tokens = random_tokens(T + 1, seed=17)
    cache = small(row, tokens)
    feed(cache, tokens.cut(0, T))
    feed(cache, tokens.cut(T, T + 1))
    assert not cache.is_trimmable()
    before = copy.deepcopy(cache)
    assert cache.trim(5) == 0
    assert cache.offset == T + 1
    same_state(cache, before)


@evicting_rows
def test_a_batch_is_not_rewound_in_parts(row: MethodRow) -> None:
    rows = [random_tokens(T, seed=34), random_tokens(9, seed=35)]
    ragged = Ragged(small_config(row), rows)
    ragged.prompt(T)
    feed(ragged.batch, random_tokens(2, seed=36, batch=2), 1)
    assert ragged.batch.trim(2) == 0
    assert ragged.batch.offset.tolist() == [T + 2, 11]
    assert not ragged.batch.is_trimmable()


# ---- many sequences -------------------------------------------------------------------------


@every_row
def test_sequences_of_one_cache_do_not_influence_one_another(row: MethodRow) -> None:
    both = random_tokens(T + 1, seed=18, batch=2)
    together = small(row, both)
    out = feed(together, both.cut(0, T), 50)
    step = attend(together, both.cut(T, T + 1))
    tree, arrays = state_parts(together)
    for i in range(2):
        alone = small(row, both)
        one = both.row(i)
        assert worst(out[i : i + 1], feed(alone, one.cut(0, T), 50)) < 1e-5
        assert worst(step[i : i + 1], attend(alone, one.cut(T, T + 1))) < 1e-5
        for path, single in state_parts(alone)[1].items():
            assert same(arrays[path][i : i + 1], single), path
    assert tree


@every_row
@pytest.mark.parametrize("views", [True, False], ids=["views", "arrays"])
def test_ragged_rows_of_a_batch_equal_single_sequences(row: MethodRow, views: bool) -> None:
    rows = [random_tokens(n, seed=19 + n) for n in (T, 33, 97)]
    steps = [random_tokens(4, seed=20 + n) for n in range(3)]
    ragged = Ragged(small_config(row), rows, views=views)
    outs = ragged.prompt(50)
    later = Tokens(*(mx.concatenate(list(p), axis=0) for p in zip(*steps, strict=True)))
    decoded = feed(ragged.batch, later, 1)
    for i, (tokens, step) in enumerate(zip(rows, steps, strict=True)):
        alone = new_cache(small_config(row), shape_of(tokens), views=views)
        assert worst(outs[i], feed(alone, tokens, 50)) < 1e-5
        assert worst(decoded[i : i + 1], feed(alone, step, 1)) < 1e-5
        assert ragged.batch.offset.tolist()[i] == tokens.length + 4
        same_state(ragged.batch.extract(i), alone)


@every_row
def test_rows_leave_and_join_a_batch(row: MethodRow) -> None:
    rows = [random_tokens(n, seed=n) for n in (40, 60, 80)]
    batch = Ragged(small_config(row), rows[:2])
    batch.prompt(80)
    newcomer = Ragged(small_config(row), rows[2:])
    newcomer.prompt(80)
    batch.batch.extend(newcomer.batch)
    batch.batch.filter([2, 0])
    step = random_tokens(1, seed=21, batch=2)
    out = attend(batch.batch, step)
    for i, tokens in enumerate((rows[2], rows[0])):
        alone = small(row, tokens)
        feed(alone, tokens)
        assert worst(out[i : i + 1], attend(alone, step.row(i))) < 1e-5


# ---- copies, states, files ------------------------------------------------------------------


def state_twin(row: MethodRow, cache: Any, tokens: Tokens) -> Any:
    twin = small(row, tokens)
    twin.state = cache.state
    return twin


@every_row
@pytest.mark.parametrize("way", ["deepcopy", "state", "extract"])
def test_a_copy_and_its_original_go_their_own_ways(row: MethodRow, way: str) -> None:
    tokens = random_tokens(T, seed=22)
    left, right = random_tokens(40, seed=23), random_tokens(40, seed=24)
    cache = fed(row, tokens)
    if way == "state":
        twin = state_twin(row, cache, tokens)
    elif way == "deepcopy":
        twin = copy.deepcopy(cache)
    else:
        twin = type(cache).merge([cache]).extract(0)
    feed(twin, right, 3)
    feed(cache, left, 3)
    for one, own in ((cache, left), (twin, right)):
        alone = fed(row, tokens)
        feed(alone, own, 3)
        same_state(one, alone)


@every_row
def test_a_state_goes_on_as_its_owner_would(row: MethodRow) -> None:
    tokens, more = random_tokens(T, seed=25), random_tokens(40, seed=26)
    cache = fed(row, tokens)
    mx.eval(cache.state)
    twin = state_twin(row, cache, tokens)
    assert twin.offset == cache.offset == T
    assert same(feed(twin, more, 1), feed(cache, more, 1))
    same_state(twin, cache)


@every_row
def test_a_saved_cache_attends_alike(row: MethodRow, tmp_path: Any) -> None:
    layers = [random_tokens(T + 1, seed=27), random_tokens(T + 1, seed=28)]
    more = random_tokens(5, seed=29)
    config = small_config(row)
    caches = [fed(row, tokens) for tokens in layers]
    nbytes = save_caches(tmp_path / "one", caches, config)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    assert nbytes <= sum(c.nbytes for c in caches)
    loaded = load_caches(tmp_path / "one", plan_of(shape_of(layers[0]), 2), config)
    for cache, back in zip(caches, loaded, strict=True):
        assert back.offset == cache.offset
        same_state(back, cache)
        assert worst(feed(back, more, 1), feed(cache, more, 1)) < 1e-5
        same_state(back, cache)
    with pytest.raises(CacheStateError, match="2 layers, this model has 3"):
        load_caches(tmp_path / "one", plan_of(shape_of(layers[0]), 3), config)


# ---- what is said about a cache -------------------------------------------------------------


@every_row
def test_offset_is_absolute_and_a_cache_is_never_false(row: MethodRow) -> None:
    tokens = random_tokens(T, seed=30)
    cache = small(row, tokens)
    assert bool(cache)
    assert bool(type(cache).merge([cache]))
    assert cache.empty()
    assert not hasattr(cache, "bits")
    assert not hasattr(type(cache).merge([cache]), "bits")
    for done in range(0, T, 30):
        feed(cache, tokens.cut(done, done + 30))
        assert cache.offset == done + 30
    feed(cache, tokens.cut(0, 5), 1)
    assert cache.offset == T + 5
    assert not cache.empty()
    assert cache.size() == held_rows(cache)[0].shape[2] <= cache.offset


@keeping_rows
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_bytes_held_are_those_of_the_estimate(row: MethodRow, dtype: mx.Dtype) -> None:
    tokens = random_tokens(300, seed=31, dtype=dtype)
    config, shape = small_config(row), shape_of(tokens)
    cache = new_cache(config, shape)
    before = 0
    for at in range(300):
        attend(cache, tokens.cut(at, at + 1))
        cache.commit()
        wanted = held(config, shape, at + 1)
        assert abs(cache.nbytes - wanted.nbytes) <= 0.02 * wanted.nbytes, at
        assert wanted.rows == cache.size()
        if (at + 1) % 96 == 0:
            assert cache.nbytes > before
            before = cache.nbytes


@evicting_rows
def test_bytes_of_kept_rows_are_those_of_the_estimate(row: MethodRow) -> None:
    tokens = random_tokens(T, seed=32, dtype=mx.bfloat16)
    config, shape = small_config(row), shape_of(tokens)
    step = shape.full_bytes(WINDOW_STEP) + 4 * shape.n_kv_heads * WINDOW_STEP
    for n in (10, 20, T):
        cache = new_cache(config, shape)
        feed(cache, tokens.cut(0, n - 1))
        attend(cache, tokens.cut(n - 1, n))
        cache.commit()
        wanted = held(config, shape, n)
        assert wanted.rows == cache.size()
        assert abs(cache.nbytes - wanted.nbytes) <= 0.02 * wanted.nbytes + step


@every_row
def test_counters_are_whole_and_agree(row: MethodRow) -> None:
    tokens = random_tokens(T, seed=33, dtype=mx.bfloat16)
    cache = small(row, tokens)
    assert all(isinstance(n, int) and n >= 0 for n in counters(cache).values())
    feed(cache, tokens.cut(0, T - 1), 70)
    feed(cache, tokens.cut(T - 1, T))
    cache.commit()
    said = counters(cache)
    assert all(isinstance(n, int) and n >= 0 for n in said.values())
    pairs = {
        "tokens_seen": cache.offset, "tokens_total": cache.offset, "tokens_kept": cache.size(),
        "full_seq_bytes": shape_of(tokens).full_bytes(T),
    }  # fmt: skip
    for name, wanted in pairs.items():
        assert said.get(name, wanted) == wanted, name
    if "compressed_key_bytes" in said:
        packed = said["compressed_key_bytes"] + said["compressed_value_bytes"]
        assert packed + said["residual_fp16_bytes"] == cache.nbytes
        both = said["fp16_key_bytes"] + said["fp16_value_bytes"]
        assert both == shape_of(tokens).full_bytes(T)
    for side in ("key", "value"):
        if f"full_{side}_bytes" in said:
            assert said[f"evicted_{side}_bytes"] < said[f"full_{side}_bytes"]


# ---- refusals -------------------------------------------------------------------------------


def refused(config: KVCacheConfig, field: str, value: Any) -> str:
    tokens = random_tokens(1)
    with pytest.raises(QuantizerConfigError) as caught:
        new_cache(config, shape_of(tokens))
    told = str(caught.value)
    assert f"{field}={value!r}" in told
    return told


@every_row
@pytest.mark.parametrize("value", [0, -4, 4096, True, 64.0, "64"])
def test_a_bad_head_size_is_refused(row: MethodRow, value: Any) -> None:
    told = refused(KVCacheConfig(method=row.name, head_dim=value), "head_dim", value)
    assert "at least 1" in told
    assert "1024" in told


@pytest.mark.parametrize(
    "row", [r for r in READY if r.kind in ("quantization", "hybrid")], ids=lambda r: r.name
)
@pytest.mark.parametrize("value", [0, -1, 7, 9, 2.9, 2.0, True, "2", None])
def test_a_bad_width_is_refused(row: MethodRow, value: Any) -> None:
    config = KVCacheConfig(method=row.name, bit_width_inlier=value)
    assert "one of 1, 2, 3, 4" in refused(config, "bit_width_inlier", value)


OPTIONS = [
    pytest.param(row, field.name, bad, id=f"{row.name}-{field.name}-{bad!r}")
    for row in READY
    for field in dataclasses.fields(row.options)
    for bad in ((-1, 2.5, "4") if isinstance(field.default, int) else ("nonsense", 3))
    if not isinstance(field.default, bool)
]


@pytest.mark.parametrize(("row", "field", "value"), OPTIONS)
def test_a_bad_option_is_refused(row: MethodRow, field: str, value: Any) -> None:
    config = KVCacheConfig(method=row.name, options=row.options(**{field: value}))
    told = refused(config, field, value)
    assert "must be" in told


@every_row
def test_options_of_another_method_are_refused(row: MethodRow) -> None:
    config = KVCacheConfig(method=row.name, options=VecInferOptions(key_sub_dim=8))
    with pytest.raises(QuantizerConfigError, match="VecInferOptions"):
        new_cache(config, shape_of(random_tokens(1)))


@every_row
@pytest.mark.parametrize("field", ["bit_width_outlier", "jl_dim", "n_outlier_channels"])
def test_a_setting_without_effect_is_refused(row: MethodRow, field: str) -> None:
    config = KVCacheConfig(method=row.name, **{field: 3})
    assert "no effect" in refused(config, field, 3)
