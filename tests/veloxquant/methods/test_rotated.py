"""turboquant_mse, turboquant_prod, qjl and polar as caches of a model."""

import itertools
import math
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import (
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.builder import build_layer
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.codebook import CodebookCodec
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.rotation import Matrix
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.codebook import CodebookSpec

# Flat tables, on the sphere of 128 dimensions.
MEAN_SQUARE = {1: 0.3609, 2: 0.1160, 3: 0.03397, 4: 0.00931}


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def codec(bits: int, *, unbiased: bool = False, seed: int = 42, dim: int = 128) -> CodebookCodec:
    return codec_for(CodebookSpec(bits, seed, unbiased, "flat"), dim)


def lost(coder: Any, x: mx.array) -> float:
    decoded = coder.decode(coder.encode(x), mx.float32)
    return (mx.square(decoded - x).sum() / mx.square(x).sum()).item()


@pytest.mark.parametrize("bits", MEAN_SQUARE)
def test_values_have_the_published_error(bits: int) -> None:
    found = lost(codec(bits), gaussian(1, 1, 4_000, 128))
    assert found == pytest.approx(MEAN_SQUARE[bits], rel=0.02)
    assert 4.0**-bits < found < math.sqrt(3) * math.pi / 2 * 4.0**-bits


def test_error_falls_with_every_bit_and_below_the_embedded_table() -> None:
    x = gaussian(1, 1, 1_500, 128)
    errors = [lost(codec(bits), x) for bits in range(1, 7)]
    assert all(b < 0.4 * a for a, b in itertools.pairwise(errors))
    for bits in (3, 4):
        assert errors[bits - 1] < lost(codec_for(CodebookSpec(bits, 42, False), 128), x)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_lone_coordinate_is_as_good_as_any(bits: int) -> None:
    lone = mx.eye(128)[None, None]
    mean = sum(lost(codec(bits, seed=s), lone) for s in range(12)) / 12
    assert mean == pytest.approx(MEAN_SQUARE[bits], rel=0.09)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_keys_are_unbiased(bits: int) -> None:
    x, q = gaussian(1, 1, 3_000, 128), gaussian(1, 1, 16, 128, seed=1)
    true, keys = q @ x.swapaxes(-1, -2), codec(bits, unbiased=True)
    slope = (true * keys.scores(q, keys.encode(x))).sum() / mx.square(true).sum()
    assert slope.item() == pytest.approx(1, abs=0.01)


def test_the_worked_example() -> None:
    u = mx.array([0.9, -0.3, 0.3, 0.1]).reshape(1, 1, 1, 4)
    for unbiased, norm in ((True, 1.1931), (False, 1.1575)):
        coder = CodebookCodec(4, CodebookSpec(2, 0, unbiased, "flat"), Matrix(mx.eye(4)))
        packed = coder.encode(u)
        assert packed["n"].item() == pytest.approx(norm, abs=1e-3)
        direction = coder.decode(packed, mx.float32) / packed["n"]
        wanted = mx.array([0.7552, -0.2264, 0.2264, 0.2264])
        assert mx.allclose(direction, wanted, atol=1e-3).item()


BYTES = {
    "turboquant_mse": {1: 36, 2: 68, 3: 100, 4: 132},
    "turboquant_prod": {1: 36, 2: 70, 3: 102},
    "qjl": {2: 66, 3: 82, 4: 98},
    "polar": {2: 100, 3: 132},
}


@pytest.mark.parametrize(
    ("method", "bits", "size"), [(m, b, n) for m, sizes in BYTES.items() for b, n in sizes.items()]
)
def test_bytes_of_a_token_are_those_of_the_paper(method: str, bits: int, size: int) -> None:
    tokens = random_tokens(256, seed=1, k_dim=128, dtype=mx.bfloat16)
    cache = new_cache(KVCacheConfig(method=method, bit_width_inlier=bits), shape_of(tokens))
    cache.update_and_fetch(tokens.keys, tokens.values)
    cache.commit()
    assert cache.nbytes == 2 * 256 * size


@pytest.mark.parametrize(("rows", "size"), [(256, 82), (512, 114), (1_024, 178)])
def test_signs_beyond_the_channels_cost_their_bits(rows: int, size: int) -> None:
    tokens = random_tokens(128, seed=1, k_dim=128, dtype=mx.bfloat16)
    cache = new_cache(KVCacheConfig(method="qjl", jl_dim=rows), shape_of(tokens))
    feed(cache, tokens.cut(0, 127))
    out = attend(cache, tokens.cut(127, 128))
    assert mx.isfinite(out).all().item()
    cache.commit()
    assert cache.nbytes == 2 * 128 * size


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_values_of_qjl_are_off_by_half_a_step(bits: int) -> None:
    tokens = random_tokens(60, seed=2, k_dim=128)
    cache = new_cache(KVCacheConfig(method="qjl", bit_width_inlier=bits), shape_of(tokens))
    feed(cache, tokens)
    cache.commit()
    groups = tokens.values.reshape(1, 2, 60, 4, 32)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / (2**bits - 1)
    off = mx.abs(held_rows(cache)[1].reshape(groups.shape) - groups)
    assert (off <= 0.5 * step + 1e-5).all().item()


def test_few_signs_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="veloxquant.methods.qjl"):
        for _ in range(2):
            build_layer(KVCacheConfig(method="qjl", head_dim=72), LayerShape(1, 1, 72, 72))
    assert [r.message for r in caplog.records].count(
        "qjl with 72 signs for 72 channels is noisy; jl_dim=144 or more scores better"
    ) == 1


# ---- loud channels --------------------------------------------------------------------------

TWO_STREAMS: dict[str, Any] = {
    "n_outlier_channels": 8, "n_calib_tokens": 20, "enable_outlier_two_stream": True,
}  # fmt: skip
split_methods = pytest.mark.parametrize(
    ("method", "fields"),
    [("turboquant_mse", {"bit_width_outlier": 4}), ("turboquant_prod", {"bit_width_outlier": 3}),
     ("turboquant_prod", {"jl_dim": 128}), ("qjl", {"jl_dim": 128}), ("qjl", {})],
    ids=str,
)  # fmt: skip


@split_methods
def test_two_streams_do_not_depend_on_the_pieces(method: str, fields: dict[str, Any]) -> None:
    tokens = random_tokens(90, seed=3)
    config = KVCacheConfig(method=method, head_dim=64, **TWO_STREAMS, **fields)
    caches = []
    for size in (1, 7, 90):
        cache = new_cache(config, shape_of(tokens))
        for at in range(0, 90, size):
            part = tokens.cut(at, min(at + size, 90))
            cache.update_and_fetch(part.keys, part.values)
            cache.commit()
            estimate = held(config, shape_of(tokens), cache.offset).nbytes
            assert abs(cache.nbytes - estimate) <= 0.02 * estimate
        caches.append(cache)
    same_state(caches[0], caches[1])
    same_state(caches[0], caches[2])
    # Trimmed into the calibration, the tokens wait again.
    assert caches[0].trim(80) == 80
    assert caches[0].size() == 10
    assert worst(held_rows(caches[0])[1], tokens.values[:, :, :10]) < 4


@split_methods
def test_two_streams_attend_to_what_they_hold(method: str, fields: dict[str, Any]) -> None:
    tokens = random_tokens(70, seed=4, batch=2)
    config = KVCacheConfig(method=method, head_dim=64, **TWO_STREAMS, **fields)
    cache = new_cache(config, shape_of(tokens))
    feed(cache, tokens.cut(0, 69), 30)
    now = tokens.cut(69, 70)
    out = attend(cache, now)
    keys, values = (mx.repeat(a, 2, axis=1) for a in held_rows(cache))
    weights = mx.softmax(now.queries @ keys.swapaxes(-1, -2) * 64**-0.5, axis=-1)
    assert worst(out, weights @ values) < 1e-4


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["turboquant_mse", "turboquant_prod", "qjl", "polar"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("capacity", 9), ("sliding_window", 9), ("enable_fused_query_dot", True),
     ("enable_vectorized_attend", False), ("dtype", mx.float16), ("observers", [print])],
)  # fmt: skip
def test_settings_of_the_standalone_objects_are_refused(
    method: str, field: str, value: Any
) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        build_layer(KVCacheConfig(method=method, **{field: value}), LayerShape(1, 1, 128, 128))


def test_loud_channels_leave_others_in_keys_and_in_values() -> None:
    config = KVCacheConfig(
        method="turboquant_mse", n_outlier_channels=64, enable_outlier_two_stream=True
    )
    with pytest.raises(QuantizerConfigError, match="n_outlier_channels=64"):
        build_layer(config, LayerShape(1, 1, 128, 64))


def test_odd_heads_have_no_pairs() -> None:
    with pytest.raises(QuantizerConfigError, match="head_dim=65 is odd"):
        build_layer(KVCacheConfig(method="polar", head_dim=65), LayerShape(1, 1, 65, 65))


@pytest.mark.parametrize("value", [3, 12, 0, 8_192, "8", 8.0])
def test_signs_come_in_bytes(value: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="jl_dim"):
        build_layer(KVCacheConfig(method="qjl", jl_dim=value), LayerShape(1, 1, 128, 128))
