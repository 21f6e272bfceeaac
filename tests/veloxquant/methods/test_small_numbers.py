"""fp16 rows whose steps are hardly more than the least number of the type."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import Tokens, feed, held_rows, new_cache, random_tokens, same_state, shape_of

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import CacheGenOptions

METHODS: dict[str, Any] = {
    "age_tiered": None,
    "zipcache": None,
    "amc": None,
    "kivi": None,
    "gear": None,
    "cachegen": None,
    "cachegen by token": CacheGenOptions(cachegen_per_channel=False),
}
each_method = pytest.mark.parametrize("name", METHODS)


def filled(name: str, tokens: Tokens, size: int = 200) -> Any:
    config = KVCacheConfig(method=name.split()[0], options=METHODS[name])
    cache = new_cache(config, shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


def scaled(factor: float, dtype: mx.Dtype, length: int = 1200) -> Tokens:
    drawn = random_tokens(length, seed=41, heads=1, factor=factor)
    return Tokens(*(a.astype(dtype) for a in drawn))


@each_method
@pytest.mark.parametrize("factor", [1e-5, 1e-6])
def test_small_rows_lose_no_more_than_large_ones(name: str, factor: float) -> None:
    """Steps rounded to nothing made every code the least one: more error than energy."""
    lost = []
    for tokens in (scaled(factor, mx.float16), scaled(1.0, mx.float32)):
        rows = held_rows(filled(name, tokens))
        size = 1 / factor if tokens.keys.dtype == mx.float16 else 1.0
        lost.append([
            mx.square(size * (now.astype(mx.float32) - true.astype(mx.float32)))[:, :, :500].mean()
            for now, true in zip(rows, tokens[1:], strict=True)
        ])  # fmt: skip
    for now, usual in zip(*lost, strict=True):
        # 1e-6 itself is rounded to 17 steps of the type.
        assert mx.all(now < 1.25 * usual + 1e-3).item()


@each_method
def test_pieces_do_not_matter_to_small_rows(name: str) -> None:
    small, large = scaled(1e-6, mx.float16, 300), scaled(1.0, mx.float16, 300)
    tokens = small.then(large)
    whole = filled(name, tokens, 600)
    for size in (1, 77):
        same_state(whole, filled(name, tokens, size))


@pytest.mark.parametrize("factor", [1e-4, 1e-5, 1e-6])
def test_small_tokens_of_age_tiered_keep_their_values_when_they_are_young_again(
    factor: float,
) -> None:
    tokens = scaled(factor, mx.float16)
    cache = filled("age_tiered", tokens)
    before = held_rows(cache)
    cache.trim(600)
    for now, then in zip(held_rows(cache), before, strict=True):
        apart = mx.abs(now.astype(mx.float32) - then[:, :, :600].astype(mx.float32))
        assert mx.all(apart <= 2e-3 * mx.abs(then).max().astype(mx.float32) + 2.0**-24).item()


def test_small_first_values_of_zipcache_leave_large_ones_finite() -> None:
    tokens = scaled(1e-6, mx.float16, 128).then(scaled(10_000.0, mx.float16, 128))
    _, values = held_rows(filled("zipcache", tokens))
    assert mx.isfinite(values).all().item()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "side"), [("zipcache", 2), ("amc", 1), ("amc", 2)])
def test_what_is_no_number_does_not_spoil_a_fit(name: str, side: int, wrong: float) -> None:
    """Constants are fitted to the first tokens, and serve all that come later."""
    tokens = scaled(1.0, mx.float32, 300)
    place = mx.arange(300)[:, None]
    rows = list(tokens)
    rows[side] = mx.where(place == 20, wrong, rows[side])
    now = held_rows(filled(name, Tokens(*rows)))[side - 1]
    usual = held_rows(filled(name, tokens))[side - 1]
    others = (place != 20).squeeze()
    assert mx.isfinite(mx.where(others[:, None], now, 0.0)).all().item()
    lost = [mx.square(mx.where(others[:, None], a - tokens[side], 0.0)).sum() for a in (now, usual)]
    assert mx.all(lost[0] < 1.2 * lost[1]).item()
