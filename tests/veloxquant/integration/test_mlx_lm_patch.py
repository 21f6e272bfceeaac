"""Models that give compressed caches to whoever asks mlx-lm for some."""

from collections.abc import Iterator
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.architectures import feed, prompt, tiny
from veloxquant.cache.builder import KVCacheBuilder
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.integration.mlx_lm_patch import patch_model_kv_cache

KIVI = KVCacheConfig(method="kivi", residual_length=32)


@pytest.fixture(params=["llama", "falcon_h1"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = tiny(request.param)
    yield made
    vars(made).pop("make_cache", None)


def test_a_patched_model_gives_fresh_compressed_caches(model: Any) -> None:
    before = type(model).__dict__.get("make_cache")
    first = patch_model_kv_cache(model, KIVI)
    second = make_prompt_cache(model)
    assert [type(c) for c in first] == [type(c) for c in second]
    assert not {*map(id, first)} & {*map(id, second)}
    feed(model, prompt(8), second)
    assert make_prompt_cache(model)[-1] is not second[-1]
    assert type(model).__dict__.get("make_cache") is before
    other = patch_model_kv_cache(model, KVCacheConfig(method="h2o"))
    built = KVCacheBuilder.for_model(model, KVCacheConfig(method="h2o"))
    assert [type(c) for c in other] == [type(c) for c in built]
    del model.make_cache
    plain = make_prompt_cache(model)
    assert any(type(c) is KVCache or hasattr(c, "caches") for c in plain)
    assert len(plain) == len(first)


def test_a_model_that_cannot_be_served_stays_as_it_was(model: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="bit_width_inlier"):
        patch_model_kv_cache(model, KVCacheConfig(method="kivi", bit_width_inlier=99))
    assert "make_cache" not in vars(model)
