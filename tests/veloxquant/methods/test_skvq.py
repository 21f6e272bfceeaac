"""skvq: exact ends, one fit for any chunking, its own widths, a cap that is kept."""

import mlx.core as mx
import pytest
from cache_lab import feed, held_rows, new_cache, random_tokens, same, same_state, shape_of, worst

from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SKVQOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

N, W = 5, 64


def cache_of(tokens, **fields):
    options = SKVQOptions(**{"skvq_window": W, **fields})
    return new_cache(KVCacheConfig(method="skvq", options=options), shape_of(tokens))


@pytest.mark.parametrize("total", [1, 5, 6, 133, 134, 200, 400])
def test_both_ends_are_the_input(total: int) -> None:
    tokens = random_tokens(total, seed=1, heads=1)
    cache = cache_of(tokens)
    feed(cache, tokens, 50)
    cache.commit()
    packed = cache.quantized_tokens
    assert packed == (0 if total < N + 2 * W + 32 else (total - W) // 32 * 32 - N)
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, :N], true[:, :, :N])
        assert same(got[:, :, N + packed :], true[:, :, N + packed :])
        if packed:
            assert worst(got, true) > 1e-3


def test_the_fit_does_not_depend_on_the_pieces() -> None:
    tokens = random_tokens(300, seed=2, batch=2)
    caches = []
    for size in (1, 5, 64, 300):
        caches.append(cache_of(tokens))
        feed(caches[-1], tokens, size)
    for other in caches[1:]:
        same_state(caches[0], other)
    assert mx.array_equal(caches[0].key_perms, caches[-1].key_perms).item()


def test_what_was_fitted_is_forgotten_with_the_tokens() -> None:
    tokens, other = random_tokens(200, seed=3), random_tokens(200, seed=4)
    cache = cache_of(tokens)
    assert cache.key_perms is None
    assert cache.perm_bytes == 0
    feed(cache, tokens)
    cache.commit()
    assert cache.key_perms.shape == cache.value_perms.shape == (1, 2, 64)
    assert cache.perm_bytes == 2 * 2 * 64
    cache.trim(190)
    assert cache.key_perms is None
    feed(cache, other)
    assert cache.tokens_seen == 210


def test_keys_and_values_have_their_own_widths() -> None:
    tokens = random_tokens(400, seed=5)
    cache = cache_of(tokens, skvq_bits_key=4, skvq_bits_value=1)
    feed(cache, tokens)
    cache.commit()
    errors = [
        mx.square(got - true).mean().item() / mx.square(true).mean().item()
        for got, true in zip(held_rows(cache), tokens[1:], strict=True)
    ]
    assert errors[0] < 0.01 < 0.1 < errors[1]
    assert cache.compressed_key_bytes > cache.compressed_value_bytes


def test_bytes_of_the_default() -> None:
    """The formula is 448,544 bytes; buffers grow in steps and constants are counted."""
    size = held(KVCacheConfig(method="skvq"), LayerShape(1, 1, 128, 128), 4_096).nbytes
    assert 448_544 <= size <= 1.05 * 448_544


def test_a_generation_goes_on_past_the_planned_length(caplog: pytest.LogCaptureFixture) -> None:
    tokens = random_tokens(210, seed=6)
    planned, free = cache_of(tokens, skvq_max_ctx=193), cache_of(tokens)
    outs = [feed(cache, tokens, 35) for cache in (planned, free)]
    assert same(*outs)
    same_state(planned, free)
    assert [r.message for r in caplog.records if "skvq_max_ctx=193" in r.message] != []
    feed(cache_of(tokens, skvq_max_ctx=193), tokens, 35)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("skvq_bits_key", 5), ("skvq_bits_value", 0), ("skvq_group_size", 48), ("skvq_window", -1),
        ("skvq_n_sink", -1), ("skvq_reorder", 1), ("skvq_clip_search", "yes"),
        ("skvq_clip_alpha", 0.3), ("skvq_clip_alpha", 1.01), ("skvq_max_ctx", N + W),
    ],
)  # fmt: skip
def test_out_of_range(field: str, value: object) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        cache_of(random_tokens(1), **{field: value})


def test_the_common_width_is_refused() -> None:
    config = KVCacheConfig(method="skvq", bit_width_inlier=4)
    with pytest.raises(QuantizerConfigError, match="bit_width_inlier=4 has no effect"):
        new_cache(config, shape_of(random_tokens(1)))
