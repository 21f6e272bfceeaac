"""Every ready row and every common field: it changes what a cache is or does, or it is refused."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_lab import (
    READY,
    every_row,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    shape_of,
    small_config,
)

from veloxquant.cache.builder import KVCacheFactory, build_layer
from veloxquant.cache.context import LayerSample
from veloxquant.cache.table import TABLE, MethodRow, held
from veloxquant.config.common_fields import READERS
from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.methods import a2ats, vecinfer
from veloxquant.observers import LatencyObserver
from veloxquant.planning.method_settings import COMMON_FIELDS, fields_of
from veloxquant.quantizers.sizes import LayerShape

SHAPE = LayerShape(4, 2, 64, 64)
AWAY: dict[str, Any] = {
    "bit_width_inlier": 4,
    "bit_width_outlier": 4,
    "jl_dim": 128,
    "n_outlier_channels": 4,
    "n_calib_tokens": 40,
    "enable_outlier_two_stream": True,
    "enable_vectorized_attend": False,
    "enable_fused_query_dot": True,
    "dtype": mx.float16,
    "capacity": 3,
    "sliding_window": 3,
    "observers": [LatencyObserver()],
    "seed": 7,
    "store": object(),
    "residual_length": 96,
    "n_sink_tokens": 9,
    "smooth_factors": np.linspace(0.5, 2, 64),
    "key_codebook": np.random.default_rng(0).standard_normal((4096, 4)),
    "value_codebook": np.random.default_rng(1).standard_normal((256, 8)),
    "eviction_storage": "affine4",
    "fused_sdpa": True,
    "fused_sdpa_max_ctx": 4096,
    "fused_sdpa_memory_bound": True,
}
"""A value of each common field that is not its default."""
OBJECTS = [field for field, methods in READERS.items() if methods is STANDALONE_METHODS]


def test_every_common_field_is_looked_at() -> None:
    assert set(AWAY) == set(READERS)


@every_row
def test_a_common_field_that_a_method_does_not_read_is_refused(row: MethodRow) -> None:
    refused = [field for field in READERS if row.name not in READERS[field]]
    assert refused
    for field in refused:
        config = KVCacheConfig(method=row.name).with_fields(**{field: AWAY[field]})
        told = f"{field}={AWAY[field]!r} has no effect on method {row.name!r}; leave it unset"
        for build in (row.check, KVCacheFactory.create, lambda c: build_layer(c, SHAPE)):
            with pytest.raises(QuantizerConfigError) as caught:
                build(config)
            assert told in str(caught.value) or field == "sliding_window"


@every_row
def test_the_defaults_may_be_said_everywhere(row: MethodRow) -> None:
    usual = KVCacheConfig()
    said = {field: getattr(usual, field) for field in READERS}
    row.check(KVCacheConfig(method=row.name, **said))


SIZES = ("bit_width_inlier", "jl_dim", "residual_length", "n_sink_tokens", "eviction_storage")


@pytest.mark.parametrize(
    ("field", "method"), [(field, name) for field in SIZES for name in sorted(READERS[field])]
)
def test_settings_of_size_change_the_size(field: str, method: str) -> None:
    usual = KVCacheConfig(method=method, head_dim=64)
    other = usual.with_fields(**{field: AWAY[field]})
    assert held(other, SHAPE, 500).nbytes != held(usual, SHAPE, 500).nbytes


CALIBRATED = {"vecinfer": vecinfer, "a2ats": a2ats}
"""Methods whose seed is that of a calibration."""


@pytest.mark.parametrize("method", sorted(READERS["seed"] - set(CALIBRATED)))
def test_another_seed_gives_other_outputs(method: str) -> None:
    tokens = random_tokens(150, seed=3)
    outs = []
    for seed in (42, 7):
        cache = new_cache(small_config(TABLE[method], seed=seed), shape_of(tokens))
        feed(cache, tokens.cut(0, 140), 1 if method == "cam" else None)
        outs.append(feed(cache, tokens.cut(140, 150), 1))
    assert not same(*outs)


@pytest.mark.parametrize("method", CALIBRATED)
def test_another_seed_gives_another_calibration(method: str) -> None:
    _, k, v = random_tokens(600, seed=4)
    options = TABLE[method].options()
    for name in ("key_codebook_bits", "value_codebook_bits", "a2ats_codebook_bits"):
        if hasattr(options, name):
            setattr(options, name, 4)
    rope = nn.RoPE(64)
    sample = LayerSample(0, 1, SHAPE, k[0], v[0], None, mx.arange(600), rope)
    books = []
    for seed in (42, 7):
        config = KVCacheConfig(method=method, head_dim=64, options=options, seed=seed)
        fitted = CALIBRATED[method].fit(sample=sample, config=config)
        books.append(fitted.get("key_codebook", fitted.get("a2ats_codebook")))
    assert not same(*books)


@pytest.mark.parametrize("field", ["smooth_factors", "key_codebook", "value_codebook"])
def test_arrays_of_vecinfer_change_its_rows(field: str) -> None:
    tokens = random_tokens(40, seed=5)
    rows = []
    for given in ({}, {field: AWAY[field]}):
        config = KVCacheConfig(method="vecinfer", head_dim=64, **given)
        cache = new_cache(config, shape_of(tokens))
        feed(cache, tokens)
        cache.commit()
        rows.append(held_rows(cache)["value" in field])
    assert not same(*rows)


@pytest.mark.parametrize("field", OBJECTS)
@pytest.mark.parametrize("method", sorted(STANDALONE_METHODS))
def test_settings_of_single_objects_are_refused_for_a_model(method: str, field: str) -> None:
    config = KVCacheConfig(method=method, head_dim=64).with_fields(**{field: AWAY[field]})
    with pytest.raises(QuantizerConfigError, match=f"{field}=.* has no effect on the caches of a"):
        build_layer(config, SHAPE)
    KVCacheFactory.create(config)


@pytest.mark.parametrize("method", sorted(STANDALONE_METHODS))
def test_single_objects_refuse_tokens_over_their_capacity(method: str) -> None:
    cache = KVCacheFactory.create(KVCacheConfig(method=method, head_dim=64, capacity=3))
    cache.append_key(mx.ones((3, 64)))
    with pytest.raises(CacheStateError, match="capacity=3"):
        cache.append_key(mx.ones(64))


@pytest.mark.parametrize(
    ("method", "field"),
    [("turboquant_mse", "bit_width_outlier")]
    + [(name, "n_calib_tokens") for name in sorted(READERS["n_calib_tokens"])],
)
def test_settings_of_loud_channels_need_loud_channels(method: str, field: str) -> None:
    config = KVCacheConfig(method=method).with_fields(**{field: AWAY[field]})
    with pytest.raises(QuantizerConfigError, match=f"{field}={AWAY[field]} .*n_outlier_channels"):
        KVCacheFactory.create(config)


@every_row
def test_text_can_set_what_a_method_reads(row: MethodRow) -> None:
    own = set(vars(row.options()))
    common = {name for name in COMMON_FIELDS if row.name in READERS[name]}
    assert set(fields_of(row.name)) == own | common


@pytest.mark.parametrize("seed", [-1, 1.5, True, 1 << 32])
def test_a_bad_seed_is_refused(seed: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=f"seed={seed!r}"):
        TABLE["cam"].check(KVCacheConfig(method="cam", seed=seed))


@pytest.mark.parametrize("form", ["zip", "affine5", "", 4, None])
def test_an_unknown_form_of_rows_is_refused(form: Any) -> None:
    config = KVCacheConfig(method="h2o", seed=7).with_fields(eviction_storage=form)
    with pytest.raises(QuantizerConfigError, match=r"eviction_storage=.*exact, affine8, affine4"):
        TABLE["h2o"].check(config)


def test_the_seed_of_rotated_rows_counts() -> None:
    tokens = random_tokens(60, seed=8)
    rows = []
    for seed in (42, 7):
        fields = {"seed": seed, "eviction_storage": "turboquant3"}
        cache = new_cache(small_config(TABLE["h2o"], **fields), shape_of(tokens))
        feed(cache, tokens)
        cache.commit()
        rows.append(held_rows(cache)[0])
    assert not same(*rows)
    with pytest.raises(QuantizerConfigError, match="seed=7 has no effect on method 'h2o'"):
        TABLE["h2o"].check(KVCacheConfig(method="h2o", seed=7, eviction_storage="affine4"))


def test_the_largest_seed_works() -> None:
    tokens = random_tokens(60, seed=6)
    for method in sorted(READERS["seed"]):
        config = small_config(TABLE[method], seed=(1 << 32) - 2)
        feed(new_cache(config, shape_of(tokens)), tokens)


def test_stores_are_read_by_rows_that_can_be_calibrated() -> None:
    fitted = {row.name for row in READY if row.calibration != "none"}
    assert READERS["store"] == fitted | STANDALONE_METHODS
