"""anchorkv: what is exact, what a residual is worth, and who gets one."""

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

from veloxquant.cache.layouts import tiered
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AnchorKVOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.dsa.mlx_pack import unpack
from veloxquant.quantizers.sizes import LayerShape

C, M, W = 128, 1, 8
SMALL = {"window": W}


def config_of(**fields) -> KVCacheConfig:
    given = {f"anchorkv_{name}": value for name, value in (SMALL | fields).items()}
    return KVCacheConfig(method="anchorkv", options=AnchorKVOptions(**given))


def filled(tokens: Tokens, size: int | None = None, **fields):
    cache = new_cache(config_of(**fields), shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


def structured(length: int, seed: int, heads: int = 1) -> Tokens:
    """Keys with a bias, 16 directions and noise."""
    plain = random_tokens(length, seed=seed, heads=heads)
    draws = mx.random.split(mx.random.key(seed + 1), 3)
    basis = mx.random.normal((16, 64), key=draws[0])
    mixed = mx.random.normal((1, heads, length, 16), key=draws[1]) @ basis / 4
    bias = 2 * mx.random.normal((64,), key=draws[2])
    noise = 0.3 * mx.random.normal(plain.keys.shape, key=mx.random.key(seed))
    return plain._replace(keys=bias + mixed + noise)


def arrays(cache, side: int = 0) -> dict[str, mx.array]:
    return cache.streams()[side][1].compact()[3]


def error(now: mx.array, true: mx.array) -> float:
    return (mx.linalg.norm(now - true) / mx.linalg.norm(true)).item()


@pytest.mark.parametrize("total", [1, C, C + W, C + W + 1, 2 * C + W + 5])
def test_anchors_and_the_newest_tokens_are_exact(total: int) -> None:
    tokens = structured(total, 1, heads=2)
    cache = filled(tokens, 50)
    blocks = max(0, total - 1 - W) // C
    assert cache.n_anchor_total == blocks * M
    for side, (now, true) in enumerate(zip(held_rows(cache), tokens[1:], strict=True)):
        assert same(now[:, :, 1 + blocks * C :], true[:, :, 1 + blocks * C :])
        exact = (now == true).all(axis=-1)[:, :, 1 : 1 + blocks * C]
        assert (exact.sum(axis=-1) >= blocks * M).all().item()
        assert same(now[:, :, :1], true[:, :, :1])
        if blocks:
            assert arrays(cache, side)["a"].shape[2] == blocks * M


def test_slots_are_counted_and_the_others_have_none() -> None:
    tokens = structured(1 + 2 * C + W, 2, heads=2)
    slots = int(0.7 * (C - M))
    cache = filled(tokens)
    assert cache.n_residual_total == 2 * 2 * slots
    assert filled(tokens, rho=0.0).n_residual_total == 0
    assert filled(tokens, rho=1.0, theta=0.0).n_residual_total == 2 * 2 * (C - M)
    classes = unpack(arrays(cache)["m"], 1, 2 * C).reshape(1, 2, 2, C)
    assert ((classes == 0).sum(axis=-1) == slots).all().item()


def test_repeated_tokens_need_no_residual() -> None:
    once = structured(8, 3)
    index = mx.zeros(1 + C + W, dtype=mx.uint32)
    tokens = Tokens(*(mx.take(a, index, axis=2) for a in once))
    cache = filled(tokens)
    assert cache.n_residual_total == 0
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert worst(now, true) < 1e-5


def test_slots_are_those_above_theta_when_they_are_few() -> None:
    once = structured(8, 4)
    index = mx.zeros(1 + C + W, dtype=mx.uint32)
    tokens = Tokens(*(mx.take(a, index, axis=2) for a in once))
    odd = (mx.arange(1 + C + W) % 16 == 5)[:, None]
    noise = mx.random.normal(tokens.values.shape, key=mx.random.key(9))
    cache = filled(tokens._replace(values=mx.where(odd, noise, tokens.values)))
    assert cache.n_residual_total == C // 16


def test_error_falls_with_every_setting() -> None:
    tokens = structured(1 + 4 * C + W, 5)

    def lost(**fields) -> float:
        return error(held_rows(filled(tokens, **fields))[0], tokens.keys)

    for ladder in (
        [lost(rho=r) for r in (0.0, 0.5, 0.7, 1.0)],
        [lost(residual_bits=b) for b in (1, 2, 3, 4)],
        [lost(anchor_frac=f) for f in (1 / 128, 1 / 16, 1 / 4)],
    ):
        assert ladder == sorted(ladder, reverse=True)
        assert ladder[-1] < 0.9 * ladder[0]


def test_projections_are_orthogonal() -> None:
    tokens = structured(1 + C + W, 6)
    cache = filled(tokens, rho=0.0)
    for side, (now, true) in enumerate(zip(held_rows(cache), tokens[1:], strict=True)):
        del side
        rest = (true - now)[:, :, 1 : 1 + C]
        inner = mx.abs((rest * now[:, :, 1 : 1 + C]).sum(axis=-1))
        lengths = mx.square(true[:, :, 1 : 1 + C]).sum(axis=-1)
        assert (inner <= 1e-3 * lengths).all().item()
        assert (mx.square(rest).sum(axis=-1) <= lengths * (1 + 1e-5)).all().item()


@pytest.mark.parametrize("factor", [0.25, 64.0])
def test_scale_changes_factors_and_nothing_else(factor: float) -> None:
    tokens = structured(1 + C + W, 7)
    scaled = Tokens(tokens.queries, factor * tokens.keys, factor * tokens.values)
    for now, other in zip(held_rows(filled(tokens)), held_rows(filled(scaled)), strict=True):
        assert worst(factor * now, other) <= 1e-4 * factor


@pytest.mark.parametrize("size", [1, 7, 64])
def test_state_does_not_depend_on_pieces(size: int) -> None:
    tokens = structured(2 * C + W + 9, 8, heads=2)
    same_state(filled(tokens, size), filled(tokens))


def test_the_seed_is_part_of_the_code() -> None:
    tokens = structured(1 + C + W, 9)
    one, other, again = (held_rows(filled(tokens, seed=s))[0] for s in (1, 2, 1))
    assert same(one, again)
    assert not same(one, other)


@pytest.mark.parametrize("rho", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("length", [1, 30])
def test_attention_by_anchor_is_attention_to_the_rows(length: int, rho: float) -> None:
    total = 3 * C + W + 10
    tokens = random_tokens(total + length, seed=10, repeat=3)
    cache = new_cache(config_of(rho=rho), shape_of(tokens))
    feed(cache, tokens.cut(0, total), 100)
    now = tokens.cut(total, total + length)
    out = attend(cache, now)
    wanted = mx.fast.scaled_dot_product_attention(
        now.queries, *held_rows(cache), scale=64**-0.5, mask="causal"
    )
    assert worst(out, wanted) < 1e-4


def test_tokens_that_numbers_of_anchors_do_not_reach_stay_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiered, "MAX_ANCHORS", 2)
    tokens = random_tokens(5 * C, seed=8)
    cache = filled(tokens, 100)
    end = 1 + 2 * C
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, end:], true[:, :, end:])
        assert not same(got[:, :, 1:end], true[:, :, 1:end])
    shape = shape_of(tokens)
    assert cache.nbytes == held(config_of(), shape, 5 * C).nbytes


def test_bytes_at_the_documented_defaults() -> None:
    config = KVCacheConfig(method="anchorkv")
    nbytes = held(config, LayerShape(1, 1, 128, 128), 4096).nbytes
    slots = int(0.7 * 127)
    side = 256 + slots * 34 + 128 * 2
    numbers = 128 * 2 + 16
    assert nbytes == 31 * (2 * side + numbers) + 2 * (256 + 128 * 256)
    assert 2_097_152 / nbytes == pytest.approx(7.2, abs=0.1)


def test_shares_out_of_range_are_refused() -> None:
    for field, value in (("anchor_frac", 0.5), ("theta", 1.0), ("rho", 1.5)):
        with pytest.raises(QuantizerConfigError, match=f"anchorkv_{field}"):
            filled(random_tokens(1), **{field: value})
