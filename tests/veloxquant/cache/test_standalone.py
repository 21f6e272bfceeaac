"""The caches that are fed vector by vector: what every standalone method shares."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.artifacts import InMemoryArtifactStore
from veloxquant.cache.builder import KVCacheBuilder, KVCacheFactory
from veloxquant.cache.sliding_window_cache import SlidingWindowKVCache
from veloxquant.cache.standalone import StandaloneCache
from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig
from veloxquant.core.abstractions import KVCache
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.math.lloyd_max import normal_levels
from veloxquant.math.rotation import make_jl_matrix, make_rotation_matrix
from veloxquant.observers import DistortionObserver, KeyNormObserver, QuantizationEvent

D = 64
every_method = pytest.mark.parametrize("method", sorted(STANDALONE_METHODS))


def rows(n: int, seed: int = 0) -> mx.array:
    return mx.random.normal((n, D), key=mx.random.key(seed))


def made(method: str, **fields: Any) -> Any:
    return KVCacheFactory.create(KVCacheConfig(method=method, head_dim=D, **fields))


def fed(cache: KVCache, n: int, seed: int = 0) -> KVCache:
    for k, v in zip(rows(n, seed), rows(n, seed + 1), strict=True):
        cache.append(k, v)
    return cache


def held(cache: StandaloneCache) -> list[mx.array]:
    """Keys and values as the codes stand for them."""
    streams = (cache.layer.keys_stream, cache.layer.values_stream)
    return [
        mx.concatenate([store.decode(0, store.length, mx.float32) for store in s.stores()], axis=2)
        for s in streams
    ]


@every_method
def test_attention_reads_the_codes_however_it_is_told_to(method: str) -> None:
    q, outs = rows(1, 9)[0], []
    for fused, vectorized in ((False, True), (True, True), (False, False)):
        cache = made(method, enable_fused_query_dot=fused, enable_vectorized_attend=vectorized)
        fed(cache, 20)
        outs.append(cache.attend(q))
    assert outs[0].shape == (D,)
    keys, values = held(cache)
    weights = mx.softmax(q @ keys[0, 0].T * D**-0.5)
    for out in outs:
        assert mx.abs(out - weights @ values[0, 0]).max().item() < 1e-4


@every_method
def test_vectors_one_by_one_or_together_give_the_same_codes(method: str) -> None:
    one, many = fed(made(method), 40), made(method)
    many.append_key(rows(40))
    many.append_value(rows(40, 1))
    for a, b in zip(held(one), held(many), strict=True):
        assert mx.array_equal(a, b).item()
    assert len(one) == len(many) == 40


@every_method
def test_bytes_are_those_of_the_buffers_and_reset_gives_them_back(method: str) -> None:
    cache = made(method)
    assert isinstance(cache, KVCache)
    assert cache.memory_bytes() == len(cache) == 0
    fed(cache, 5)
    assert cache.memory_bytes() == sum(a.nbytes for a in cache.layer.arrays()) > 0
    first = cache.attend(rows(1, 9)[0])
    cache.reset()
    assert cache.memory_bytes() == len(cache) == 0
    assert mx.array_equal(fed(cache, 5).attend(rows(1, 9)[0]), first).item()


@every_method
def test_a_full_cache_refuses_and_says_so(method: str) -> None:
    cache = fed(made(method, capacity=3), 3)
    with pytest.raises(CacheStateError, match="capacity=3"):
        cache.append_key(rows(1)[0])
    assert len(cache) == 3


@every_method
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_window_holds_what_a_fresh_cache_would(method: str, wrapped: bool) -> None:
    window = 7
    if wrapped:
        inner = made(method)
        cache: Any = SlidingWindowKVCache(inner, window)
    else:
        cache = inner = made(method, sliding_window=window, capacity=window)
    fed(cache, 150)
    fresh = made(method)
    fresh.append_key(rows(150)[-window:])
    fresh.append_value(rows(150, 1)[-window:])
    assert len(cache) == window
    for a, b in zip(held(inner), held(fresh), strict=True):
        assert mx.array_equal(a, b).item()
    q = rows(1, 9)[0]
    assert mx.abs(cache.attend(q) - fresh.attend(q)).max().item() < 1e-5
    assert cache.memory_bytes() <= 2 * fresh.memory_bytes()


def test_a_window_around_another_kind_of_cache_feeds_it_again() -> None:
    class Plain(KVCache):
        def __init__(self) -> None:
            self.reset()

        def append_key(self, k: Any) -> None:
            self.keys.append(k)

        def append_value(self, v: Any) -> None:
            self.values.append(v)

        def attend(self, q: Any) -> Any:
            return mx.softmax(q @ mx.stack(self.keys).T) @ mx.stack(self.values)

        def memory_bytes(self) -> int:
            return 0

        def reset(self) -> None:
            self.keys: list[Any] = []
            self.values: list[Any] = []

    cache = SlidingWindowKVCache(Plain(), 4)
    fed(cache, 10)
    assert len(cache) == len(cache.inner.keys) == 4
    assert mx.array_equal(cache.inner.keys[0], rows(10)[6]).item()
    assert cache.memory_bytes() == 2 * 4 * D * 4
    with pytest.raises(QuantizerConfigError, match="window_size=0"):
        SlidingWindowKVCache(Plain(), 0)


@every_method
@pytest.mark.parametrize("shape", [(D + 1,), (2, D + 1), (1, 1, D), ()])
def test_a_wrong_shape_is_refused(method: str, shape: tuple[int, ...]) -> None:
    cache = made(method)
    with pytest.raises(ValueError, match=rf"must be \({D},\)"):
        cache.append_key(mx.zeros(shape))
    with pytest.raises(ValueError, match="query"):
        fed(cache, 1).attend(mx.zeros((2, D)))


def test_a_key_without_its_value_is_not_attended() -> None:
    cache = made("turboquant_mse")
    with pytest.raises(CacheStateError, match="empty"):
        cache.attend(rows(1)[0])
    cache.append_key(rows(1)[0])
    with pytest.raises(CacheStateError, match="1 keys and 0 values"):
        cache.attend(rows(1)[0])


@every_method
def test_types_go_in_and_come_out(method: str) -> None:
    cache = fed(made(method), 3)
    assert cache.attend(rows(1)[0].astype(mx.float16)).dtype == mx.float16
    cast = fed(made(method, dtype=mx.bfloat16), 3)
    assert cast.attend(rows(1)[0]).dtype == mx.bfloat16
    assert cast.memory_bytes() < cache.memory_bytes()
    assert np.isfinite(np.array(made_from_numpy(method))).all()


def made_from_numpy(method: str) -> mx.array:
    cache = made(method)
    cache.append(np.ones(D, dtype=np.float32), np.arange(D))
    return cache.attend(np.ones(D, dtype=np.float32))


@every_method
def test_observers_hear_of_every_step(method: str) -> None:
    heard: list[QuantizationEvent] = []

    class Ear:
        def on_event(self, event: QuantizationEvent) -> None:
            heard.append(event)

    distortion, norms = DistortionObserver(b=2, d=D), KeyNormObserver()
    cache = fed(made(method, observers=[Ear(), distortion, norms]), 4)
    cache.attend(rows(1)[0])
    assert [e.stage for e in heard] == ["append_key", "append_value"] * 4 + ["attend"]
    assert all(e.elapsed_ms > 0 for e in heard)
    assert sum(e.memory_delta_bytes for e in heard) == cache.memory_bytes()
    assert norms.report().n_tokens == 4
    assert distortion.report().empirical_mse > 0


# ---- loud channels --------------------------------------------------------------------------


def loud(n: int, seed: int = 0) -> mx.array:
    return rows(n, seed) * mx.where((mx.arange(D) == 5) | (mx.arange(D) == 40), 20.0, 1.0)


@pytest.mark.parametrize("method", ["turboquant_mse", "turboquant_prod", "qjl"])
def test_loud_channels_are_found_and_coded_apart(method: str) -> None:
    fields: dict[str, Any] = {} if method == "qjl" else {"bit_width_outlier": 4}
    apart = made(
        method, n_outlier_channels=2, n_calib_tokens=10, enable_outlier_two_stream=True, **fields
    )
    plain = made(method)
    keys = loud(30)
    for cache in (apart, plain):
        for i in range(30):
            cache.append(keys[i], rows(30, 1)[i])
            if cache is apart:
                assert cache.outlier_channels == (None if i < 9 else [5, 40])
    true, lost = rows(200, 5) @ keys.T, []
    for cache in (apart, plain):
        found = held(cache)[0][0, 0]
        lost.append(mx.square(rows(200, 5) @ found.T - true).mean().item())
    assert lost[0] < lost[1]
    with pytest.raises(QuantizerConfigError, match="n_calib_tokens"):
        made(method, n_outlier_channels=2, enable_outlier_two_stream=True, sliding_window=10)


def test_loud_channels_outlive_the_tokens_and_are_found_without_a_split() -> None:
    split = made(
        "turboquant_mse", n_outlier_channels=2, n_calib_tokens=4, enable_outlier_two_stream=True
    )
    split.append_key(loud(6))
    split.append_value(rows(6))
    split.reset()
    assert len(split) == 0
    assert split.outlier_channels == [5, 40]
    fed(split, 6)
    assert split.outlier_channels == [5, 40]
    alone = made("turboquant_mse", n_outlier_channels=2, n_calib_tokens=4)
    alone.append_key(loud(3))
    assert alone.outlier_channels is None
    alone.append_key(loud(3, 1))
    assert alone.outlier_channels == [5, 40]
    plain = made("turboquant_mse")
    plain.append_key(mx.concatenate([loud(3), loud(3, 1)]))
    wanted = plain.layer.keys_stream.body.decode(0, 6, mx.float32)
    assert mx.array_equal(alone.layer.keys_stream.body.decode(0, 6, mx.float32), wanted).item()


def test_the_documented_example_builds() -> None:
    builder = KVCacheBuilder().with_method("turboquant_prod").with_head_dim(128)
    cache = builder.with_bit_width(inlier=2, outlier=3).with_jl_dim(128).with_seed(42).build()
    cache.append(mx.ones((128,)), mx.ones((128,)))
    assert cache.attend(mx.ones((128,))).shape == (128,)


# ---- artifacts ------------------------------------------------------------------------------


@every_method
def test_rotations_levels_and_sketches_come_from_the_store(method: str) -> None:
    store = InMemoryArtifactStore()
    same = fed(made(method, store=store), 3).attend(rows(1, 9)[0])
    assert mx.array_equal(same, fed(made(method), 3).attend(rows(1, 9)[0])).item()
    for seed in (42, 43):
        store.save_rotation_matrix(make_rotation_matrix(D, 5), D, seed)
    store.save_jl_matrix(make_jl_matrix(D, D, 5), D, D, 42)
    for bits in (1, 2):
        store.save_codebook(np.array(normal_levels(bits)) / D**0.5, "gaussian", bits, D)
    other = fed(made(method, store=store), 3)
    keys, values = held(other)
    assert not mx.array_equal(keys, held(fed(made(method), 3))[0]).item()
    q = rows(1, 9)[0]
    wanted = mx.softmax(q @ keys[0, 0].T * D**-0.5) @ values[0, 0]
    assert mx.abs(other.attend(q) - wanted).max().item() < 1e-4


def test_codes_with_a_stored_rotation_do_not_depend_on_company() -> None:
    store = InMemoryArtifactStore()
    for seed in (42, 43):
        store.save_rotation_matrix(make_rotation_matrix(D, 5), D, seed)
    one, many = (made("turboquant_mse", store=store, bit_width_inlier=6) for _ in range(2))
    fed(one, 60)
    many.append_key(rows(60))
    many.append_value(rows(60, 1))
    for a, b in zip(held(one), held(many), strict=True):
        assert mx.array_equal(a, b).item()


def test_a_codebook_of_another_size_is_refused() -> None:
    class Wrong(InMemoryArtifactStore):
        def load_codebook(self, distribution: str, b: int, d: int) -> Any:
            del distribution, b, d
            return mx.array([-1.0, 1.0])

    store = Wrong()
    store.save_codebook(np.array(normal_levels(2)) / D**0.5, "gaussian", 2, D)
    with pytest.raises(ValueError, match="2 levels"):
        made("turboquant_mse", store=store)


# ---- refusals -------------------------------------------------------------------------------


@every_method
def test_a_list_of_widths_belongs_to_a_model(method: str) -> None:
    with pytest.raises(QuantizerConfigError, match="for_model"):
        made(method, bit_width_inlier=[2, 3])


@every_method
@pytest.mark.parametrize(
    ("field", "value"),
    [("enable_vectorized_attend", 1), ("sliding_window", 0), ("capacity", 0),
     ("enable_fused_query_dot", "yes")],
)  # fmt: skip
def test_a_bad_setting_is_refused(method: str, field: str, value: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{field}={value!r}"):
        made(method, **{field: value})


@pytest.mark.parametrize(
    "fields",
    [{"n_outlier_channels": D}, {"enable_outlier_two_stream": True}, {"bit_width_outlier": 9},
     {"n_calib_tokens": 0, "n_outlier_channels": 1}],
    ids=str,
)  # fmt: skip
def test_impossible_loud_channels_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match="must be"):
        made("turboquant_mse", **fields)
