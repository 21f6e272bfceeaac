"""kvtc: what is exact, when the basis is fitted, and that later tokens leave it alone."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
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

from veloxquant.cache.attend import attend as attention
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.rope import turn_rows
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import KVTCOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.kvtc import build, fit
from veloxquant.quantizers.sizes import LayerShape

SINKS, FIT = 4, 256


def config_of(**options: Any) -> KVCacheConfig:
    return KVCacheConfig(method="kvtc", options=KVTCOptions(**options))


def filled(tokens: Tokens, size: int = 128, **options: Any) -> Any:
    cache = new_cache(config_of(**options), shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


@pytest.mark.parametrize("total", [1, 4, 260, 300, 323, 324, 383, 384])
def test_nothing_is_coded_before_the_fit_and_blocks_are_whole_after(total: int) -> None:
    tokens = random_tokens(total, seed=1, heads=1)
    cache = filled(tokens)
    behind = max(0, total - SINKS)
    body = total // 64 * 64 - SINKS if behind >= FIT + 64 else 0
    lengths = [min(total, SINKS), body, behind - body]
    for side in cache.streams():
        assert [store.length for store in side] == lengths
    keys, values = held_rows(cache)
    for got, true in ((keys, tokens.keys), (values, tokens.values)):
        assert same(got[:, :, :SINKS], true[:, :, :SINKS])
        assert same(got[:, :, SINKS + body :], true[:, :, SINKS + body :])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("budget", [100, 512])
def test_bytes_are_planned_at_every_length(budget: int, dtype: mx.Dtype) -> None:
    tokens = random_tokens(700, seed=2, heads=2, k_dim=64, v_dim=96, dtype=dtype)
    config = config_of(kvtc_bit_budget=budget)
    cache = new_cache(config, shape_of(tokens))
    for at in range(0, 700, 50):
        cache.update_and_fetch(*tokens.cut(at, at + 50)[1:])
        cache.commit()
        assert cache.nbytes == held(config, shape_of(tokens), at + 50).nbytes
    assert all(a.dtype == dtype for a in held_rows(cache))


def test_the_state_does_not_depend_on_the_pieces() -> None:
    tokens = random_tokens(460, seed=3)
    whole = filled(tokens, 460)
    for size in (1, 77, 300):
        same_state(whole, filled(tokens, size))


def test_later_tokens_leave_the_basis_alone() -> None:
    tokens = random_tokens(400, seed=4)
    early, late = filled(tokens.cut(0, 340)), filled(tokens)
    before, after = (c.streams()[0][1].live[3] for c in (early, late))
    for name in ("basis", "mean", "step", "bits", "lane"):
        assert same(before[name], after[name])
    assert same(before["w"][:, :, :256], after["w"][:, :, :256])


def test_rows_of_a_batch_have_bases_of_their_own() -> None:
    both = random_tokens(330, seed=5, batch=2)
    together = filled(both)
    for i in range(2):
        alone = filled(both.row(i))
        for name, array in alone.streams()[1][1].live[3].items():
            assert same(together.streams()[1][1].live[3][name][i : i + 1], array), name


@pytest.mark.parametrize("kernels", [None, False])
@pytest.mark.parametrize("budget", [30, 512, 600])
def test_attention_reads_what_it_holds(budget: int, kernels: bool | None) -> None:
    tokens = random_tokens(451, seed=6, heads=2, k_dim=128)
    cache = filled(tokens.cut(0, 450), kvtc_bit_budget=budget)
    last = tokens.cut(450, 451)
    attend(cache, last)
    keys, values = cache.runs()
    out = attention(
        last.queries, keys, values, n_kv=2, v_dim=128, scale=128**-0.5, mask=None,
        use_kernels=kernels,
    )  # fmt: skip
    wanted = mx.fast.scaled_dot_product_attention(last.queries, *held_rows(cache), scale=128**-0.5)
    assert worst(out, wanted) <= 1e-4


@pytest.mark.parametrize(("k_dim", "v_dim"), [(80, 80), (112, 96), (192, 128), (256, 256)])
def test_other_head_sizes(k_dim: int, v_dim: int) -> None:
    tokens = random_tokens(351, seed=14, heads=1, k_dim=k_dim, v_dim=v_dim)
    cache = filled(tokens.cut(0, 350))
    last = tokens.cut(350, 351)
    out = attend(cache, last)
    keys, values = held_rows(cache)
    wanted = mx.fast.scaled_dot_product_attention(last.queries, keys, values, scale=k_dim**-0.5)
    assert worst(out, wanted) <= 1e-4
    for got, true in ((keys, tokens.keys), (values, tokens.values)):
        assert mx.square(got - true).mean().item() < 0.5 * mx.square(true).mean().item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_large_norms_and_zeros_stay_finite(dtype: mx.Dtype) -> None:
    loud = random_tokens(330, seed=15, heads=1, dtype=dtype, factor=30_000.0)
    keys, values = held_rows(filled(loud))
    assert mx.isfinite(keys).all().item()
    assert mx.square((values - loud.values) / 30_000.0).mean().item() < 0.05
    zeros = Tokens(*(mx.zeros_like(a) for a in loud))
    assert not any(mx.abs(a).max().item() for a in held_rows(filled(zeros)))


def test_structured_rows_cost_little_at_a_small_budget() -> None:
    draw = np.random.default_rng(8)
    basis, noise = draw.standard_normal((16, 128)), 0.05
    rows = draw.standard_normal((1, 1, 900, 16)) @ basis / 4
    rows = mx.array((rows + noise * draw.standard_normal(rows.shape)).astype(np.float32))
    tokens = Tokens(rows, rows, rows)
    keys, _ = held_rows(filled(tokens, kvtc_bit_budget=128))
    error = mx.square(keys - rows).sum() / mx.square(rows).sum()
    assert error.item() < 2 * noise**2


@pytest.mark.parametrize("partial", [64, 32])
def test_keys_turned_by_position_are_coded_well_at_later_positions(partial: int) -> None:
    draws = mx.random.split(mx.random.key(16), 3)
    still = mx.random.normal((1, 2, 600, 64), key=draws[0]) * mx.exp(-mx.arange(64) / 16)
    still = still @ mx.random.normal((64, 64), key=draws[1]) / 8 + 2 * mx.random.normal(
        (64,), key=draws[2]
    )
    rope = nn.RoPE(partial, base=100_000.0)
    keys = mx.concatenate([rope(still[:, :, :300]), rope(still[:, :, 300:], offset=5_000)], axis=2)
    lost = []
    for known in (None, rope):
        shape = shape_of(Tokens(keys, keys, keys))
        cache = build(config_of(kvtc_bit_budget=256), shape, LayerContext(rope=known))
        cache.update_and_fetch(keys, keys)
        cache.commit()
        got, _ = held_rows(cache)
        error = mx.square(got - keys).sum(axis=-1)[:, :, 320:576].mean()
        lost.append((error / mx.square(keys).sum(axis=-1).mean()).item())
    assert lost[1] < 0.03
    assert lost[0] > 5 * lost[1]


def test_a_calibration_lowers_the_error_of_later_keys() -> None:
    """The first 256 keys, which the basis is fitted to, do not show all that comes later."""
    draws = mx.random.split(mx.random.key(17), 3)
    mix = mx.random.normal((2, 64, 64), key=draws[0]) * mx.exp(-mx.arange(64) / 12)[:, None]
    still, other = (
        mx.random.normal((1, 2, n, 64), key=k) for n, k in zip((2_000, 900), draws[1:], strict=True)
    )
    dull = (mx.arange(900) < 280)[:, None] & (mx.arange(64) % 4 == 1)
    still, other = still @ mix, mx.where(dull, 0.0, other) @ mix
    rope = nn.RoPE(64, base=100_000.0)
    shape = LayerShape(2, 2, 64, 64)
    text = mx.array([*range(1_000), *range(1_000)])
    seen = turn_rows(rope, still, mx.broadcast_to(text, still.shape[:3]))[0]
    sample = LayerSample(0, 1, shape, seen, seen, None, text, rope)
    found = fit(config_of(), sample)
    keys = rope(other)
    lost = []
    for artifacts in (None, found):
        context = LayerContext(rope=rope, artifacts=artifacts)
        cache = build(config_of(kvtc_bit_budget=160), shape, context)
        assert cache.calibrated == (artifacts is not None)
        cache.update_and_fetch(keys, keys)
        cache.commit()
        got, _ = held_rows(cache)
        later = (mx.square(a)[:, :, 260:836].sum().item() for a in (got - keys, keys))
        lost.append(next(later) / next(later))
    assert lost[1] < 0.8 * lost[0]


@pytest.mark.parametrize("change", [lambda a: a[..., :-1], lambda a: a * mx.nan])
def test_calibrated_moments_of_another_model_are_refused(change: Any) -> None:
    shape = LayerShape(2, 2, 64, 64)
    found = {"key_mean": mx.zeros((1, 2, 1, 64)), "key_covariance": mx.zeros((1, 2, 64, 64))}
    build(config_of(), shape, LayerContext(artifacts=found))
    found["key_mean"] = change(found["key_mean"])
    with pytest.raises(QuantizerConfigError, match="calibrated moments of keys"):
        build(config_of(), shape, LayerContext(artifacts=found))


def test_a_trim_below_the_fit_starts_over() -> None:
    tokens, other = random_tokens(400, seed=9), random_tokens(300, seed=10)
    cache = filled(tokens)
    assert cache.trim(150) == 150
    assert cache.kvtc_bytes == 0
    assert cache.offset == 250
    feed(cache, other)
    cache.commit()
    lengths = [store.length for store in cache.streams()[0]]
    assert lengths == [SINKS, 508, 38]
    assert same(held_rows(cache)[0][:, :, -38:], other.keys[:, :, -38:])


def test_a_saved_cache_attends_alike(tmp_path: Any) -> None:
    from cache_lab import plan_of

    tokens, more = random_tokens(400, seed=11), random_tokens(5, seed=12)
    cache = filled(tokens)
    save_caches(tmp_path / "one", [cache], config_of())
    (back,) = load_caches(tmp_path / "one", plan_of(shape_of(tokens), 1), config_of())
    same_state(back, cache)
    assert worst(feed(back, more, 1), feed(cache, more, 1)) < 1e-5


def test_counters() -> None:
    tokens = random_tokens(400, seed=13)
    cache = filled(tokens)
    assert cache.bit_budget == 512
    assert cache.pre_entropy_bytes == 2 * 2 * 384 * 64
    assert cache.pre_entropy_bytes < cache.kvtc_bytes < cache.nbytes
    assert cache.entropy_coding_gain >= 0.99
    assert cache.full_seq_bytes == shape_of(tokens)._replace(itemsize=2).full_bytes(400)
    assert filled(tokens.cut(0, 9)).entropy_coding_gain == 1.0


@pytest.mark.parametrize("choices", [(1, 2), (0, 9), (0, 2, 1), (0,), (0, 1.5), "01", (0, True)])
def test_impossible_widths_are_refused(choices: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="kvtc_bit_choices"):
        filled(random_tokens(1), kvtc_bit_choices=choices)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("words", [1, 3, 40])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_repeated_first_tokens_do_not_spoil_the_later_ones(
    words: int, known: bool, dtype: mx.Dtype
) -> None:
    """A prompt may begin with blanks or padding; half the energy of what came later was lost."""
    tokens, place = random_tokens(700, seed=33), mx.arange(700)
    index = mx.where(place < 300, place % words, place)
    rope = nn.RoPE(64)
    # No loud channel: a first row in which it happens to be silent cannot tell of it.
    keys, values = (mx.take(a, index, axis=2) for a in (tokens.queries[:, ::2], tokens.values))
    tokens = Tokens(*(a.astype(dtype) for a in (tokens.queries, rope(keys), values)))
    context = LayerContext(views=True, rope=rope if known else None)
    cache = build(config_of(), shape_of(tokens), context)
    cache.returns = "views"
    feed(cache, tokens, 100)
    cache.commit()
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        lost, whole = (mx.square(a.astype(mx.float32)) for a in (got - true, true))
        for cut in (slice(4, 260), slice(400, 640)):
            assert mx.all(lost[:, :, cut].sum() < 2e-3 * whole[:, :, cut].sum()).item()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("first", ["equal", "flat", "nan", "inf"])
def test_any_first_rows_give_a_basis(first: str, known: bool) -> None:
    tokens, place = random_tokens(700, seed=31), mx.arange(700)[:, None]
    changed = {
        "equal": mx.where(place < 300, tokens.keys[:, :, 5:6], tokens.keys),
        "flat": tokens.keys[..., :2] @ tokens.keys[:, :, :2],
        "nan": mx.where(place == 30, mx.nan, tokens.keys),
        "inf": mx.where(place == 30, mx.inf, tokens.keys),
    }
    rope = nn.RoPE(64)
    tokens = tokens._replace(keys=rope(changed[first]))
    context = LayerContext(views=True, rope=rope if known else None)
    cache = build(config_of(), shape_of(tokens), context)
    cache.returns = "views"
    feed(cache, tokens, 64)
    cache.commit()
    got, true = held_rows(cache)[0][:, :, 400:], tokens.keys[:, :, 400:]
    assert mx.isfinite(got).all().item()
    if first == "flat" and not known:
        return  # such rows say nothing of later ones
    assert mx.square(got - true).sum().item() < 0.02 * mx.square(true).sum().item()
