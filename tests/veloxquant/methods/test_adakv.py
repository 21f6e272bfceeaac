"""adakv: a budget by head that is kept, for any text and any chunking."""

import mlx.core as mx
import pytest
from cache_lab import feed, held_rows, new_cache, random_tokens, same, same_state, shape_of, worst

from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AdaKVOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape


def config_of(**fields) -> KVCacheConfig:
    return KVCacheConfig(method="adakv", options=AdaKVOptions(**fields))


def cache_of(tokens, **fields):
    return new_cache(config_of(**fields), shape_of(tokens))


def wavering(total: int, heads: int = 4, batch: int = 1, seed: int = 0):
    """Keys of later heads have more uneven norms."""
    tokens = random_tokens(total, seed=seed, heads=heads, batch=batch)
    by_head = (mx.arange(heads) / heads)[:, None, None]
    factor = 1 + by_head * mx.random.normal(tokens.keys[..., :1].shape, key=mx.random.key(9))
    return tokens._replace(keys=tokens.keys * factor)


@pytest.mark.parametrize("total", [1, 31, 32, 33, 100, 256])
def test_an_unfinished_block_is_the_input(total: int) -> None:
    tokens = wavering(total)
    cache = cache_of(tokens)
    feed(cache, tokens, 50)
    cache.commit()
    coded = total // 32 * 32
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, coded:], true[:, :, coded:])
        if coded:
            assert worst(got, true) > 1e-3


@pytest.mark.parametrize("importance", ["norm_variance", "attention_entropy"])
@pytest.mark.parametrize("interval", [1, 3])
def test_widths_do_not_depend_on_the_pieces(importance: str, interval: int) -> None:
    tokens = wavering(230, batch=2)
    caches = []
    for size in (5, 64, 230):
        caches.append(cache_of(tokens, adakv_importance=importance, adakv_update_interval=interval))
        feed(caches[-1], tokens, size)
    for other in caches[1:]:
        same_state(caches[0], other)
    assert caches[0].fidelity == ("exact" if importance == "norm_variance" else "proxy")


def test_rows_of_a_batch_do_not_meet() -> None:
    tokens = wavering(200, batch=2)
    both, second = cache_of(tokens), cache_of(tokens.row(1))
    feed(both, tokens)
    feed(second, tokens.row(1))
    both.commit()
    second.commit()
    for a, b in zip(held_rows(both), held_rows(second), strict=True):
        assert worst(a[1:], b) < 1e-6


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("target", [2.1, 2.5, 3.3])
def test_the_mean_is_kept(heads: int, target: float) -> None:
    tokens = wavering(64 * 32, heads=heads)
    cache = cache_of(tokens, adakv_target_avg_bits=target)
    cache.update_and_fetch(tokens.keys, tokens.values)
    cache.commit()
    assert cache.realised_avg_bits == pytest.approx(target, abs=0.05)


def test_bits_follow_importance() -> None:
    tokens = wavering(512, heads=8)
    cache = cache_of(tokens)
    assert cache.head_bits == cache.head_importance == []
    feed(cache, tokens)
    cache.commit()
    assert sum(cache.head_bits) == 20
    assert cache.head_bits == sorted(cache.head_bits)
    assert len(set(cache.head_bits)) > 1
    order = sorted(range(8), key=lambda h: cache.head_importance[h])
    assert [cache.head_bits[h] for h in order] == sorted(cache.head_bits)
    assert cache.allowed_bits == [2, 3, 4]


def test_trimmed_statistics_are_those_of_the_kept_tokens() -> None:
    tokens, other = wavering(256), wavering(128, seed=3)
    cache, fresh = cache_of(tokens), cache_of(tokens)
    feed(cache, tokens)
    cache.trim(128)
    feed(cache, other)
    feed(fresh, tokens.cut(0, 128).then(other), 100)
    same_state(cache, fresh)


def test_keys_and_values_share_the_widths() -> None:
    tokens = wavering(256)
    cache = cache_of(tokens)
    feed(cache, tokens)
    cache.commit()
    bodies = (cache.keys_stream.body, cache.values_stream.body)
    assert mx.array_equal(*(body.units() for body in bodies)).item()


def test_bytes_of_the_default() -> None:
    """112 bytes a token and head by the formula; statistics, marks and growth steps on top."""
    size = held(config_of(), LayerShape(8, 8, 128, 128), 4_096).nbytes
    assert 112 * 4_096 * 8 <= size <= 1.02 * 112 * 4_096 * 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("adakv_target_avg_bits", 1.9), ("adakv_target_avg_bits", 4.1), ("adakv_lo_bit", 7),
        ("adakv_mid_bit", 2), ("adakv_hi_bit", 3), ("adakv_group_size", 16),
        ("adakv_update_interval", 0), ("adakv_importance", "size"), ("adakv_obs_window", 0),
        ("adakv_obs_window", 16),
    ],
)  # fmt: skip
def test_out_of_range(field: str, value: object) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{field}={value!r}"):
        cache_of(random_tokens(1), **{field: value})


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


@pytest.mark.parametrize("choices", [(2, 3, 4), (1, 3, 5), (1, 4, 6), (4, 6, 8)])
@pytest.mark.parametrize("group", [32, 64])
def test_the_kernel_reads_all_planes(choices: tuple[int, int, int], group: int) -> None:
    low, middle, high = choices
    for heads in (1, 3):
        check_kernel(
            wavering(300, heads=heads), adakv_target_avg_bits=(low + middle) / 2,
            adakv_lo_bit=low, adakv_mid_bit=middle, adakv_hi_bit=high, adakv_group_size=group,
        )  # fmt: skip
