"""Every ready row of the method table: sizes, counters, offsets, refusals."""

import dataclasses
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import (
    READY,
    T,
    attend,
    counters,
    every_row,
    evicting_rows,
    feed,
    held_rows,
    keeping_rows,
    new_cache,
    random_tokens,
    shape_of,
    small,
    small_config,
)

from veloxquant.cache.table import MethodRow, held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import KIVIOptions, VecInferOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import WINDOW_STEP

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
        if (at + 1) % 128 == 0:
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


@evicting_rows
@pytest.mark.parametrize("form", ["exact", "affine4"])
def test_bytes_of_an_answer_are_those_of_the_estimate(row: MethodRow, form: str) -> None:
    answer = 70
    tokens = random_tokens(T + answer, seed=34, dtype=mx.bfloat16)
    config, shape = small_config(row), shape_of(tokens)
    if row.row_forms:
        config = config.with_fields(eviction_storage=form)
    cache = new_cache(config, shape)
    feed(cache, tokens.cut(0, T - 1))
    # a window that moves holds up to a growth step more, which the estimate counts always
    moving = shape.full_bytes(WINDOW_STEP) if row.name == "streaming_llm" else 0
    for decoded in range(answer):  # the first single token is the prompt's last
        attend(cache, tokens.cut(T - 1 + decoded, T + decoded))
        cache.commit()
        wanted = held(config, shape, T + decoded, decoded)
        assert cache.nbytes <= wanted.most
        assert cache.size() == wanted.rows
        assert abs(cache.nbytes - wanted.nbytes) <= 0.02 * wanted.nbytes + moving


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


def bad_values(default: Any) -> tuple[Any, ...]:
    """Values that no option with this default takes."""
    if isinstance(default, int):
        return (-1, 2.5, "4")
    return ("nonsense", -3 if default is None or isinstance(default, float) else 3)


SIGNS = {"qfilters_sign"}
"""Options that may be -1."""
OPTIONS = [
    pytest.param(row, field.name, bad, id=f"{row.name}-{field.name}-{bad!r}")
    for row in READY
    for field in dataclasses.fields(row.options)
    for bad in bad_values(field.default)
    if not isinstance(field.default, bool) and not (field.name in SIGNS and bad == -1)
]


@pytest.mark.parametrize(("row", "field", "value"), OPTIONS)
def test_a_bad_option_is_refused(row: MethodRow, field: str, value: Any) -> None:
    config = KVCacheConfig(method=row.name, options=row.options(**{field: value}))
    told = refused(config, field, value)
    assert "must be" in told


@every_row
def test_options_of_another_method_are_refused(row: MethodRow) -> None:
    foreign = KIVIOptions() if row.options is VecInferOptions else VecInferOptions(key_sub_dim=8)
    config = KVCacheConfig(method=row.name, options=foreign)
    with pytest.raises(QuantizerConfigError, match=type(foreign).__name__):
        new_cache(config, shape_of(random_tokens(1)))


@every_row
@pytest.mark.parametrize("field", ["bit_width_outlier", "jl_dim", "n_outlier_channels"])
def test_a_setting_without_effect_is_refused(row: MethodRow, field: str) -> None:
    told = refused(KVCacheConfig(method=row.name, **{field: 3}), field, 3)
    # Methods that sketch take whole bytes of signs, which 3 is not.
    assert "no effect" in told or (field == "jl_dim" and "must be" in told)
