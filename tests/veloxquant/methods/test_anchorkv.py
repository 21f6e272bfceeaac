"""anchorkv: what is exact, what a residual is worth, and who gets one."""

from pathlib import Path

import mlx.core as mx
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    plan_of,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.layouts import tiered
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AnchorKVOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.dsa.mlx_pack import unpack
from veloxquant.quantizers.sizes import LayerShape

C, M, W = 128, 1, 8
LEAD = 1 + W
"""Places of the first block without a token: those of the exact first one and of the window."""
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


@pytest.mark.parametrize("total", [1, C - 1, C, C + 1, 2 * C - 1, 2 * C + W + 5])
def test_anchors_and_the_newest_tokens_are_exact(total: int) -> None:
    tokens = structured(total, 1, heads=2)
    cache = filled(tokens, 50)
    blocks = total // C
    end = max(1, blocks * C - W)
    assert cache.n_anchor_total == blocks * M
    for side, (now, true) in enumerate(zip(held_rows(cache), tokens[1:], strict=True)):
        assert same(now[:, :, end:], true[:, :, end:])
        exact = (now == true).all(axis=-1)[:, :, 1:end]
        assert (exact.sum(axis=-1) >= blocks * M).all().item()
        assert same(now[:, :, :1], true[:, :, :1])
        if blocks:
            assert arrays(cache, side)["a"].shape[2] == blocks * M


def test_slots_are_counted_and_the_others_have_none() -> None:
    tokens = structured(2 * C, 2, heads=2)
    slots = int(0.7 * (C - M))
    cache = filled(tokens)
    assert cache.n_residual_total == 2 * 2 * slots
    assert filled(tokens, rho=0.0).n_residual_total == 0
    assert filled(tokens, rho=1.0, theta=0.0).n_residual_total == 2 * (2 * (C - M) - LEAD)
    classes = unpack(arrays(cache)["m"], 1, 2 * C).reshape(1, 2, 2, C)
    assert ((classes == 0).sum(axis=-1) == slots).all().item()


def test_repeated_tokens_need_no_residual() -> None:
    once = structured(8, 3)
    index = mx.zeros(2 * C, dtype=mx.uint32)
    tokens = Tokens(*(mx.take(a, index, axis=2) for a in once))
    cache = filled(tokens)
    assert cache.n_residual_total == 0
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert worst(now, true) < 1e-5


def test_slots_are_those_above_theta_when_they_are_few() -> None:
    once = structured(8, 4)
    index = mx.zeros(2 * C, dtype=mx.uint32)
    tokens = Tokens(*(mx.take(a, index, axis=2) for a in once))
    odd = (mx.arange(2 * C) % 16 == 5)[:, None]
    noise = mx.random.normal(tokens.values.shape, key=mx.random.key(9))
    cache = filled(tokens._replace(values=mx.where(odd, noise, tokens.values)))
    assert cache.n_residual_total == 2 * C // 16


def test_error_falls_with_every_setting() -> None:
    tokens = structured(4 * C, 5)

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
    tokens = structured(C, 6)
    cache = filled(tokens, rho=0.0)
    for side, (now, true) in enumerate(zip(held_rows(cache), tokens[1:], strict=True)):
        del side
        rest = (true - now)[:, :, 1 : C - W]
        assert mx.any(rest != 0).item()
        inner = mx.abs((rest * now[:, :, 1 : C - W]).sum(axis=-1))
        lengths = mx.square(true[:, :, 1 : C - W]).sum(axis=-1)
        assert (inner <= 1e-3 * lengths).all().item()
        assert (mx.square(rest).sum(axis=-1) <= lengths * (1 + 1e-5)).all().item()


@pytest.mark.parametrize("factor", [0.25, 64.0])
def test_scale_changes_factors_and_nothing_else(factor: float) -> None:
    tokens = structured(C, 7)
    scaled = Tokens(tokens.queries, factor * tokens.keys, factor * tokens.values)
    for now, other in zip(held_rows(filled(tokens)), held_rows(filled(scaled)), strict=True):
        assert worst(factor * now, other) <= 1e-4 * factor


@pytest.mark.parametrize("size", [1, 7, 64])
def test_state_does_not_depend_on_pieces(size: int) -> None:
    tokens = structured(2 * C + W + 9, 8, heads=2)
    same_state(filled(tokens, size), filled(tokens))


def test_the_seed_is_part_of_the_code() -> None:
    tokens = structured(C, 9)
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
    end = 2 * C - LEAD + 1
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
    assert nbytes == 32 * (2 * side + numbers) + 2 * (256 + 32 * 256)
    # What the documents count: no bits of classes, no exact first token, no place without a token.
    assert nbytes == pytest.approx(248_769, rel=0.01)


def test_a_round_length_takes_what_is_planned() -> None:
    tokens = random_tokens(1024, seed=21, heads=1, repeat=1, k_dim=128, dtype=mx.bfloat16)
    config = KVCacheConfig(method="anchorkv")
    cache = new_cache(config, shape_of(tokens))
    feed(cache, tokens, 300)
    cache.commit()
    live = sum(a.nbytes for side in cache.streams() for s in side for a in s.arrays())
    assert cache.nbytes == live == held(config, shape_of(tokens), 1024).nbytes
    assert [s.length for s in cache.streams()[0]] == [1, 1024 - 33, 32]


@pytest.mark.parametrize("window", [0, 8, C - 2, C - 1, C, C + 40])
@pytest.mark.parametrize("anchor_frac", [1 / 128, 1 / 8])
def test_every_window_leaves_itself_exact(window: int, anchor_frac: float) -> None:
    """Places without a token take part in nothing, even where the first block has one token."""
    tokens = random_tokens(4 * C, seed=22)
    cache = filled(tokens, 100, window=window, anchor_frac=anchor_frac, rho=1.0, theta=0.0)
    assert cache.streams()[0][2].length == window
    now = random_tokens(1, seed=23)
    rows = held_rows(cache)
    assert rows[0].shape[2] == 4 * C
    out = attend(cache, now)
    wanted = mx.fast.scaled_dot_product_attention(now.queries, *held_rows(cache), scale=64**-0.5)
    assert worst(out, wanted) < 1e-4


@pytest.mark.parametrize("left", [3 * C, 2 * C + 1, 2 * C, C, C - 1, 1, 0])
def test_tokens_go_back_to_the_layout_of_their_length(left: int) -> None:
    tokens = structured(3 * C + 50, 24, heads=2)
    cache = filled(tokens, 90)
    before = held_rows(cache)
    assert cache.trim(3 * C + 50 - left) == 3 * C + 50 - left
    assert [s.length for s in cache.streams()[1]] == list(cache.plan.values.rows(left))
    assert cache.nbytes == held(config_of(), shape_of(tokens), left).nbytes
    if left:
        for now, then in zip(held_rows(cache), before, strict=True):
            assert worst(now, then[:, :, :left]) < 1e-5
    feed(cache, tokens.cut(left, 3 * C + 50), 77)
    cache.commit()
    assert [s.length for s in cache.streams()[0]] == list(cache.plan.keys.rows(3 * C + 50))


def test_a_saved_first_block_comes_back(tmp_path: Path) -> None:
    tokens = structured(C + 30, 25)
    cache = filled(tokens, 60)
    save_caches(tmp_path / "one", [cache], config_of())
    loaded = load_caches(tmp_path / "one", plan_of(shape_of(tokens), 1), config_of())
    same_state(cache, loaded[0])
    for fed in (cache, loaded[0]):
        feed(fed, structured(C, 26), 77)
        fed.commit()
    same_state(cache, loaded[0])


def test_shares_out_of_range_are_refused() -> None:
    for field, value in (("anchor_frac", 0.5), ("theta", 1.0), ("rho", 1.5)):
        with pytest.raises(QuantizerConfigError, match=f"anchorkv_{field}"):
            filled(random_tokens(1), **{field: value})
