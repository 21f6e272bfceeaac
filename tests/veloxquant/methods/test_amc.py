"""amc: which tier a token is in, what a tier loses, and what queries change."""

import mlx.core as mx
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AMCOptions
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.dsa.mlx_pack import unpack
from veloxquant.methods.amc import build, fit
from veloxquant.quantizers.affine import AffineTokenCodec
from veloxquant.quantizers.prefix import PrefixTokenCodec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.tiered import PrefixTokenSpec

N = 64


def config_of(**fields) -> KVCacheConfig:
    given = {f"amc_{name}": value for name, value in fields.items()}
    return KVCacheConfig(method="amc", options=AMCOptions(**given))


def filled(tokens: Tokens, size: int | None = None, **fields):
    cache = new_cache(config_of(**fields), shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


def tiers(cache) -> mx.array:
    words = cache.streams()[0][1].compact()[3]["m"]
    return unpack(words, 2, words.shape[-1] * 16)


def test_one_tier_is_uniform() -> None:
    tokens = random_tokens(2 * N, seed=1)
    keys, values = held_rows(filled(tokens, k_high=1.0, k_mid=0.0))
    for rows, true in ((keys, tokens.keys), (values, tokens.values)):
        assert mx.abs(rows - true).max().item() <= (true.max() - true.min()).item() / 255
    low = filled(tokens, k_high=0.0, k_mid=0.0)
    assert (low.tokens_high, low.tokens_mid, low.tokens_low) == (0, 0, 2 * N)


def test_the_first_tier_is_eight_bits_on_sorted_channels() -> None:
    x = random_tokens(N, seed=2).keys
    codec = PrefixTokenCodec(64, PrefixTokenSpec(8, 32, 1.0, N, pairs=True))
    packed = codec.encode(x)
    order = packed["p"].astype(mx.int32)
    flat = AffineTokenCodec(64, AffineTokenSpec(8, 32))
    rows = mx.take_along_axis(x, order, axis=-1)
    wanted = flat.decode(flat.encode(mx.contiguous(rows)), mx.float32)
    got = mx.take_along_axis(codec.decode(packed, mx.float32), order, axis=-1)
    assert same(got, wanted)


@pytest.mark.parametrize("total", [1, 63, 64, 65, 200])
def test_counts_of_the_tiers(total: int) -> None:
    tokens = random_tokens(total, seed=3, heads=3)
    cache = filled(tokens, 30)
    blocks, rest = divmod(total, N)
    counts = [cache.tokens_high, cache.tokens_mid, cache.tokens_low]
    assert counts == [13 * blocks + rest, 20 * blocks, 31 * blocks]
    if blocks:
        found = tiers(cache).reshape(1, 3, blocks, N)
        for tier, count in enumerate((13, 20, 31)):
            assert ((found == tier).sum(axis=-1) == count).all().item()
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(now[:, :, total - rest :], true[:, :, total - rest :])


def test_salient_tokens_lose_less() -> None:
    tokens = random_tokens(16 * N, seed=4)
    cache = filled(tokens)
    found = tiers(cache)[..., None]
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        lost = mx.square(now - true)
        high, mid, low = (
            ((lost * (found == t)).sum() / (found == t).sum()).item() for t in range(3)
        )
        assert high < mid < low


def test_what_is_dropped_is_the_variance_of_the_weakest_channels() -> None:
    x = mx.random.normal((1, 1, 4096, 128), key=mx.random.key(5))
    x = x * (1 + mx.arange(128) % 5) + 3.0
    codec = PrefixTokenCodec(128, PrefixTokenSpec(8, 32, 0.5, N, pairs=False))
    packed = codec.encode(x)
    kept = set(packed["p"].reshape(-1)[:64].tolist())
    spread = x.var(axis=2).reshape(-1)
    assert kept == set(mx.argsort(-spread)[:64].tolist())
    lost = mx.square(codec.decode(packed, mx.float32) - x).sum(axis=-1).mean().item()
    wanted = sum(spread[d].item() for d in range(128) if d not in kept)
    assert lost == pytest.approx(wanted, rel=0.02)


def test_pairs_of_rotary_channels_stay_together() -> None:
    codec = PrefixTokenCodec(80, PrefixTokenSpec(4, 32, 0.5, N, pairs=True))
    order = codec.fit(random_tokens(N, seed=6, k_dim=80).keys)["p"].astype(mx.int32)
    assert codec.kept == 64
    pairs = order.reshape(1, 2, 40, 2)
    assert mx.array_equal(pairs[..., 0] + 40, pairs[..., 1]).item()


@pytest.mark.parametrize("length", [1, 30])
def test_attention_by_tier_is_attention_in_order(length: int) -> None:
    tokens = random_tokens(3 * N + 10 + length, seed=7, repeat=3)
    cache = new_cache(config_of(), shape_of(tokens))
    feed(cache, tokens.cut(0, 3 * N + 10), 50)
    now = tokens.cut(3 * N + 10, 3 * N + 10 + length)
    out = attend(cache, now)
    wanted = mx.fast.scaled_dot_product_attention(
        now.queries, *held_rows(cache), scale=64**-0.5, mask="causal"
    )
    assert worst(out, wanted) < 1e-4


@pytest.mark.parametrize("size", [1, 7, 64])
def test_state_does_not_depend_on_pieces(size: int) -> None:
    tokens = random_tokens(150, seed=8)
    same_state(filled(tokens, size), filled(tokens))


def test_queries_join_the_ranking_and_are_counted() -> None:
    tokens = random_tokens(3 * N, seed=9, heads=1, repeat=2)
    needle = mx.random.normal((64,), key=mx.random.key(3))
    found = mx.arange(3 * N) % 16 == 5
    keys = mx.where(found[:, None], 0.7 * needle, tokens.keys)
    queries = mx.broadcast_to(5 * needle, tokens.queries.shape)
    tokens = Tokens(queries, keys, tokens.values)
    aware = {"use_query_saliency": True}
    base, blend, near = (
        filled(tokens, N, **f)
        for f in ({}, aware | {"query_alpha": 0.0}, aware | {"query_alpha": 1.0})
    )
    assert mx.array_equal(tiers(base), tiers(blend)).item()
    assert base.fidelity == "proxy"
    assert near.fidelity == "exact"
    later = (tiers(near) == 0)[0, 0, N:]
    assert mx.where(found[N:], later, True).all().item()
    assert not mx.where(found[N:], (tiers(base) == 0)[0, 0, N:], True).all().item()
    wanted = held(config_of(**aware), shape_of(tokens), 3 * N).nbytes
    assert near.nbytes == wanted == base.nbytes + 2 * 16 * 64 * 4
    twin = new_cache(config_of(**aware, query_alpha=1.0), shape_of(tokens))
    twin.state = near.state
    more = random_tokens(N, seed=10, heads=1)
    for cache in (near, twin):
        feed(cache, more, 20)
    same_state(near, twin)


def test_bytes_at_the_documented_defaults() -> None:
    nbytes = held(config_of(), LayerShape(1, 1, 128, 128), 4096).nbytes
    block = 13 * (128 + 16) + 20 * (48 + 12) + 31 * (32 + 8) + 16
    assert nbytes == 2 * (64 * block + 4 * 128)
    assert 2_097_152 / nbytes == pytest.approx(3.8, abs=0.1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"k_high": 0.8}, "amc_k_mid"),
        ({"adaptive_thresholds": True}, "amc_adaptive_thresholds"),
        ({"calib_variance": 1.0}, "amc_calib_variance"),
        ({"gamma": 0.0}, "amc_gamma"),
        ({"gamma": 0.2}, "amc_gamma=0.2.*without amc_adaptive_thresholds"),
        ({"threshold_window": 32}, "amc_threshold_window=32.*no effect"),
        ({"query_alpha": 0.7}, "amc_query_alpha=0.7.*amc_use_query_saliency"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict, field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        filled(random_tokens(1), **fields)


def test_rewound_tokens_take_their_queries_with_them() -> None:
    config = config_of(use_query_saliency=True, query_alpha=1.0)
    tokens, more = random_tokens(60, seed=11), random_tokens(N, seed=12)
    cache = new_cache(config, shape_of(tokens))
    attend(cache, tokens)
    cache.trim(6)
    assert same(cache.recent, tokens.queries[:, :, 44:54])
    cache.trim(49)
    assert cache.recent is None
    assert cache.fidelity == "proxy"
    assert cache.nbytes <= held(config, shape_of(tokens), 5).nbytes
    fresh = new_cache(config, shape_of(tokens))
    attend(fresh, tokens.cut(0, 5))
    for one in (cache, fresh):
        attend(one, more)
        one.commit()
        assert same(one.recent, more.queries[:, :, -16:])
    assert mx.array_equal(tiers(cache), tiers(fresh)).item()
    assert cache.nbytes == fresh.nbytes == held(config, shape_of(tokens), 5 + N).nbytes
    cache.trim(5 + N)
    assert cache.nbytes == 0


@pytest.mark.parametrize("shape", [(1, 3, 16, 64), (1, 4, 16, 17), (1, 4, 17, 64), (2, 4, 16, 64)])
def test_queries_of_another_cache_are_refused(shape: tuple[int, ...]) -> None:
    tokens = random_tokens(100, seed=13)
    config = config_of(use_query_saliency=True, query_alpha=0.5)
    cache = new_cache(config, shape_of(tokens))
    attend(cache, tokens)
    state, twin = cache.state, new_cache(config, shape_of(tokens))
    assert [a.shape for a in state[-1]] == [(1, 4, 16, 64)]
    with pytest.raises(CacheStateError, match="saved queries"):
        twin.state = [*state[:-1], [mx.zeros(shape)]]
    with pytest.raises(CacheStateError, match="saved queries"):
        twin.state = [*state[:-1], [state[-1][0].astype(mx.float16)]]
    twin.state = state
    assert twin.fidelity == "exact"


def test_a_calibration_lowers_the_error_of_values() -> None:
    """The first block, which orders the channels, does not show all that comes later."""
    draws = mx.random.split(mx.random.key(9), 2)
    spread = mx.exp(-mx.arange(64) / 12)
    text, values = (mx.random.normal((1, 1, 640, 64), key=key) * spread for key in draws)
    values = mx.where((mx.arange(640) < N)[:, None] & (mx.arange(64) % 4 == 1), 0.0, values)
    tokens = random_tokens(640, heads=1)._replace(values=values)
    shape = shape_of(tokens)
    sample = LayerSample(0, 1, shape, text[0], text[0], None, mx.arange(640))
    lost = []
    for found in (None, fit(config_of(), sample)):
        cache = build(config_of(), shape, LayerContext(artifacts=found))
        assert cache.calibrated == (found is not None)
        cache.update_and_fetch(*tokens[1:])
        cache.commit()
        lost.append(mx.square(held_rows(cache)[1] - values)[:, :, N:].sum().item())
    assert lost[1] < 0.9 * lost[0]
