"""kitty: kivi without boosted channels, exact windows, bytes of the formula."""

import mlx.core as mx
import pytest
from cache_lab import feed, held_rows, new_cache, random_tokens, same, shape_of, state_parts, worst

from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import KittyOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

R = 128


def cache_of(tokens, method: str = "kitty", common: dict | None = None, **fields):
    options = KittyOptions(**fields) if method == "kitty" else None
    config = KVCacheConfig(method=method, options=options, **(common or {}))
    return new_cache(config, shape_of(tokens))


def test_without_boosted_channels_it_is_kivi() -> None:
    tokens = random_tokens(300, seed=1)
    kitty, kivi = cache_of(tokens, kitty_hi_fraction=0.0), cache_of(tokens, "kivi")
    for cache in (kitty, kivi):
        feed(cache, tokens, 70)
    arrays = state_parts(kivi)[1]
    assert arrays.keys() == state_parts(kitty)[1].keys()
    for path, array in state_parts(kitty)[1].items():
        assert same(array, arrays[path])


@pytest.mark.parametrize("total", [1, 127, 128, 129, 300, 513])
def test_newest_tokens_are_the_input(total: int) -> None:
    tokens = random_tokens(total, seed=2, heads=1)
    cache = cache_of(tokens)
    feed(cache, tokens, 100)
    cache.commit()
    keys, values = held_rows(cache)
    packed = total // R * R
    assert same(keys[:, :, packed:], tokens.keys[:, :, packed:])
    assert same(values[:, :, -R:], tokens.values[:, :, -R:])
    if packed:
        assert worst(keys[:, :, :packed], tokens.keys[:, :, :packed]) > 1e-3


def test_a_page_keeps_its_channels() -> None:
    """Later tokens, even of other channels, do not change what is stored."""
    first, then = random_tokens(256, seed=3), random_tokens(256, seed=4, factor=20.0)
    cache = cache_of(first)
    feed(cache, first)
    cache.commit()
    before = held_rows(cache)[0][:, :, :256]
    feed(cache, then)
    cache.commit()
    assert same(held_rows(cache)[0][:, :, :256], before)


def test_boosting_saves_strong_channels() -> None:
    plain = random_tokens(256, seed=5)
    tokens = plain._replace(keys=plain.keys * mx.where(mx.arange(64) % 4 == 0, 6.0, 1.0))
    errors = []
    for fraction in (0.0, 0.25):
        cache = cache_of(tokens, kitty_hi_fraction=fraction)
        feed(cache, tokens)
        cache.commit()
        errors.append(mx.square(held_rows(cache)[0] - tokens.keys).mean().item())
    assert errors[1] <= 0.2 * errors[0]


def test_bytes_of_the_default() -> None:
    """456,704 bytes by the formula at 4,096 tokens, growth steps on top."""
    size = held(KVCacheConfig(method="kitty"), LayerShape(1, 1, 128, 128), 4_096).nbytes
    assert 456_704 <= size <= 1.02 * 456_704


def test_what_is_told() -> None:
    tokens = random_tokens(300, seed=6)
    cache = cache_of(tokens, kitty_hi_bit=8, kitty_lo_bit=4, kitty_group_size=64)
    feed(cache, tokens)
    assert (cache.hi_bit, cache.lo_bit, cache.group_size, cache.hi_fraction) == (8, 4, 64, 0.25)
    assert cache.value_fp16_bytes == cache.fp16_value_bytes == 300 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kitty_hi_fraction", 1.01), ("kitty_hi_fraction", -0.1), ("kitty_hi_bit", 2),
        ("kitty_hi_bit", 6), ("kitty_lo_bit", 1), ("kitty_lo_bit", 3), ("kitty_group_size", 16),
    ],
)  # fmt: skip
def test_out_of_range(field: str, value: object) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{field}={value}"):
        cache_of(random_tokens(1), **{field: value})


def test_widths_must_differ_and_windows_hold_whole_pages() -> None:
    tokens = random_tokens(1)
    with pytest.raises(QuantizerConfigError, match="kitty_hi_bit=4"):
        cache_of(tokens, kitty_lo_bit=4)
    with pytest.raises(QuantizerConfigError, match="residual_length=96"):
        cache_of(tokens, common={"residual_length": 96}, kitty_group_size=64)
    with pytest.raises(QuantizerConfigError, match="no effect"):
        cache_of(tokens, common={"bit_width_inlier": 4})


def check_kernel(tokens, **fields) -> None:
    """Decode steps through the compiled kernel are those of the array operations."""
    caches = [cache_of(tokens, **fields) for _ in range(2)]
    caches[1].use_kernels = False
    n = tokens.length - 2
    outs = []
    for cache in caches:
        feed(cache, tokens.cut(0, n), 200)
        outs.append(feed(cache, tokens.cut(n, n + 2), 1))
    assert worst(*outs) < 2e-4


@pytest.mark.parametrize(("low", "high"), [(2, 3), (2, 4), (2, 8), (4, 8)])
def test_the_kernel_reads_both_planes(low: int, high: int) -> None:
    for heads, dim in ((1, 64), (3, 80)):
        tokens = random_tokens(300, seed=7, heads=heads, k_dim=dim)
        check_kernel(tokens, kitty_lo_bit=low, kitty_hi_bit=high, kitty_hi_fraction=0.3)
