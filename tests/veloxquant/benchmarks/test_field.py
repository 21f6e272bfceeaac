"""Contenders that share a batch must not know of each other."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_model import make_tiny_model

from veloxquant.benchmarks.field import FieldLayer
from veloxquant.benchmarks.quality import Size, read
from veloxquant.benchmarks.rivals import stock_quantized
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.hook import attach
from veloxquant.cache.probe import native_caches
from veloxquant.config.kv_cache import KVCacheConfig

SIZE = Size(prompt=300, steps=12, budget=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny llama."""
    from mlx_lm.utils import load_model

    model, _ = load_model(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))
    model.set_dtype(mx.float32)
    attach()
    return model


def entrants(model: Any) -> dict[str, Any]:
    """One of each kind of cache."""
    config = KVCacheConfig(method="kivi", bit_width_inlier=2)
    plan = plan_model(model, config)
    return {
        "exact": (native_caches(model), lambda: None),
        "ours": (new_caches(plan, config), lambda: None),
        "stock": stock_quantized(plan, 2, 32),
    }


def test_a_row_of_the_field_is_what_the_cache_gives_alone(model: Any) -> None:
    tokens = np.random.default_rng(0).integers(1, 60, SIZE.tokens + 1).tolist()
    together = read(model, tokens, SIZE, list(entrants(model).values()))
    exact, *others = together
    assert max(exact.kl) < 1e-9
    assert all(exact.same)
    for name, sheet in zip(("ours", "stock"), others, strict=True):
        pair = entrants(model)
        alone = read(model, tokens, SIZE, [pair["exact"], pair[name]])[1]
        np.testing.assert_allclose(sheet.kl, alone.kl, rtol=1e-2, atol=1e-6)
        assert sum(sheet.kl) > 1e-4, f"{name} is exact here: the test shows nothing"


def test_the_field_agrees_with_a_plain_run(model: Any) -> None:
    ids = mx.array([list(range(1, 41))])
    plain, shared = native_caches(model), native_caches(model)
    wanted = model(ids, cache=plain)
    layers = [FieldLayer([a, b]) for a, b in zip(shared, native_caches(model), strict=True)]
    got = model(mx.concatenate([ids, ids]), cache=layers)
    np.testing.assert_allclose(np.array(got[:1]), np.array(wanted), atol=1e-4)
    assert shared[0].offset == plain[0].offset == 40
