"""Calibrated constants: fitted to a sample, used instead of fitted ones, refused on misfit."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import feed, held_rows, random_tokens, shape_of

from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError

METHODS = ("skvq", "kvquant")


def sample_of(tokens: Any) -> LayerSample:
    length = tokens.length
    return LayerSample(
        0, 1, shape_of(tokens), tokens.keys[0], tokens.values[0], None, mx.arange(length)
    )


def made(method: str, artifacts: Any, tokens: Any) -> Any:
    config = KVCacheConfig(method=method, head_dim=64)
    context = LayerContext(views=True, artifacts=artifacts)
    cache = TABLE[method].load().build(config, shape_of(tokens), context)
    cache.returns = "views"
    return cache


def fit(method: str, tokens: Any) -> dict[str, mx.array]:
    config = KVCacheConfig(method=method, head_dim=64)
    return TABLE[method].load().fit(config=config, sample=sample_of(tokens))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_constants_of_a_text_serve_another_one(method: str, dtype: mx.Dtype) -> None:
    found = fit(method, random_tokens(600, seed=1))
    text = random_tokens(400, seed=2, batch=2, dtype=dtype)
    with_it, without = made(method, found, text), made(method, None, text)
    assert with_it.calibrated
    assert not without.calibrated
    for cache in (with_it, without):
        assert mx.isfinite(feed(cache, text, 150)).all().item()
        cache.commit()
    assert with_it.nbytes == without.nbytes
    errors = [
        sum(mx.square(a.astype(mx.float32) - b.astype(mx.float32)).mean().item()
            for a, b in zip(held_rows(cache), text[1:], strict=True))
        for cache in (with_it, without)
    ]  # fmt: skip
    assert errors[0] <= 1.1 * errors[1]
    fitted = with_it.keys_stream.body.fitted
    for name, array in fitted.items():
        wanted = found[f"key_{name}"].astype(array.dtype)
        assert mx.array_equal(array, mx.broadcast_to(wanted, array.shape)).item()


@pytest.mark.parametrize("method", METHODS)
def test_constants_of_other_heads_are_refused(method: str) -> None:
    found = fit(method, random_tokens(600, seed=3, heads=3))
    with pytest.raises(QuantizerConfigError, match="calibrated constants of keys"):
        made(method, found, random_tokens(1))


@pytest.mark.parametrize("method", METHODS)
def test_a_short_text_is_refused(method: str) -> None:
    with pytest.raises(QuantizerConfigError, match="too short"):
        fit(method, random_tokens(40, seed=4))


def test_damaged_orders_are_refused() -> None:
    """An order is used as an index, and nothing behind this looks."""
    tokens = random_tokens(600, seed=1)
    found = fit("skvq", tokens)
    bad = found | {"key_order": mx.full(found["key_order"].shape, 200, dtype=mx.uint8)}
    with pytest.raises(QuantizerConfigError, match="'order' points to a place over 64"):
        made("skvq", bad, tokens)
