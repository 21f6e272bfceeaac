"""palu: groups of heads, what projection loses, turned keys, bytes."""

from typing import Any

import mlx.core as mx
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
from mlx.nn import RoPE

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.joined_heads import gathered, joined, parted, spread
from veloxquant.cache.layouts.latent import palu_groups
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import PALUOptions
from veloxquant.quantizers.latent import project
from veloxquant.quantizers.specs.latent import LatentSpec

T = 576
EXACT = {"palu_hi_bit": 16, "palu_lo_bit": 16}


def config_of(**options: Any) -> KVCacheConfig:
    return KVCacheConfig(method="palu", options=PALUOptions(**options))


def correlated(tokens: int = T, heads: int = 4, dim: int = 32, noise: float = 0.1) -> Tokens:
    """Heads that are maps of the same few numbers, and noise."""
    draws = mx.random.split(mx.random.key(4), 5)
    few = mx.random.normal((1, 1, tokens, 12), key=draws[0])
    rows = few @ mx.random.normal((1, heads, 12, dim), key=draws[1])
    rows = rows + noise * mx.random.normal(rows.shape, key=draws[2])
    queries = mx.random.normal((1, 2 * heads, tokens, dim), key=draws[3])
    return Tokens(queries, rows, rows[..., ::-1])


def filled(tokens: Tokens, size: int = 192, **options: Any) -> Any:
    cache = new_cache(config_of(**options), shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


def energy(x: mx.array) -> float:
    total: Any = mx.square(x).sum().item()
    return total


def lost(cache: Any, tokens: Tokens) -> float:
    pairs = list(zip(held_rows(cache), tokens[1:], strict=True))
    return sum(energy(a - b) for a, b in pairs) / sum(energy(b) for _, b in pairs)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_all_latents_as_they_are_give_the_rows(groups: int) -> None:
    tokens = correlated()
    cache = filled(tokens, palu_rank=4096, palu_n_head_groups=groups, **EXACT)
    assert cache.keys_stream.body.length == T
    for got, wanted in zip(held_rows(cache), tokens[1:], strict=True):
        assert worst(got, wanted) < 1e-3


def test_more_latents_never_lose_more() -> None:
    tokens = correlated()
    by_rank = [lost(filled(tokens, palu_rank=r, **EXACT), tokens) for r in (4, 8, 16, 32)]
    assert by_rank == sorted(by_rank, reverse=True)


def test_what_projection_loses_is_the_energy_of_the_other_directions() -> None:
    tokens = correlated(512)
    cache = filled(tokens, palu_rank=16, palu_n_head_groups=2, **EXACT)
    rows = np.array(joined(tokens.keys, 2), dtype=np.float64)[0]
    values = np.linalg.svd(rows, compute_uv=False) ** 2
    got = np.array(joined(held_rows(cache)[0], 2), dtype=np.float64)[0]
    away = np.square(got - rows).sum(axis=(1, 2)) / np.square(rows).sum(axis=(1, 2))
    assert np.abs(away - values[:, 16:].sum(axis=1) / values.sum(axis=1)).max() < 1e-3


def test_joint_heads_need_fewer_latents_than_single_ones() -> None:
    tokens = correlated()
    joint = lost(filled(tokens, palu_rank=32, palu_n_head_groups=1, **EXACT), tokens)
    single = lost(filled(tokens, palu_rank=8, palu_n_head_groups=4, **EXACT), tokens)
    assert joint <= single


def test_heads_are_joined_and_parted_in_order() -> None:
    x = mx.random.normal((2, 6, 5, 8))
    for size in (1, 2, 3, 6):
        assert same(parted(joined(x, size), size), x)
    q = mx.random.normal((2, 12, 5, 8))
    wide = spread(q, 6, 3)
    assert wide.shape == (2, 12, 5, 24)
    assert same(gathered(wide, 6, 3), q)
    rows = joined(x, 3)
    grouped = wide.reshape(2, 2, 30, 24) @ rows.swapaxes(-1, -2)
    single = q.reshape(2, 6, 10, 8) @ x.swapaxes(-1, -2)
    assert worst(grouped.reshape(single.shape), single) < 1e-5


@pytest.mark.parametrize(
    ("heads", "wanted", "groups"), [(8, 4, 4), (8, 3, 2), (3, 4, 3), (5, 4, 1), (1, 4, 1)]
)
def test_groups_hold_equally_many_heads(heads: int, wanted: int, groups: int) -> None:
    assert palu_groups(config_of(palu_n_head_groups=wanted), heads) == groups


@pytest.mark.parametrize("length", [1, 3, 24])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_reads_what_is_held(groups: int, length: int) -> None:
    tokens = correlated(T + length)
    cache = filled(tokens.cut(0, T), palu_n_head_groups=groups)
    now = tokens.cut(T, T + length)
    out = attend(cache, now)
    keys, values = held_rows(cache)
    mask = None if length == 1 else "causal"
    wanted = mx.fast.scaled_dot_product_attention(
        now.queries, keys, values, scale=32**-0.5, mask=mask
    )
    assert worst(out, wanted) < 1e-3


def test_state_does_not_depend_on_how_a_prompt_is_cut() -> None:
    tokens = correlated(T + 20)
    whole = filled(tokens, T + 20)
    assert whole.keys_stream.body.length == T
    for size in (9, 64):
        same_state(filled(tokens, size), whole)


def test_rows_are_exact_before_the_basis_is_fitted() -> None:
    tokens = correlated(400)
    for got, wanted in zip(held_rows(filled(tokens)), tokens[1:], strict=True):
        assert same(got, wanted)


@pytest.mark.parametrize("traditional", [True, False])
def test_directions_of_turned_keys_suit_later_positions(traditional: bool) -> None:
    tokens = correlated(1_152)
    rope = RoPE(32, traditional=traditional, base=500)
    turned = tokens._replace(keys=rope(tokens.keys))
    errors = []
    for known in (rope, None):
        config = config_of(palu_rank=40, palu_n_head_groups=2, **EXACT)
        cache = build_layer(config, shape_of(tokens), LayerContext(rope=known, views=True))
        feed(cache, turned, 512)
        keys = held_rows(cache)[0][:, :, 768:]
        away = keys - turned.keys[:, :, 768:]
        errors.append(energy(away))
    assert errors[0] < errors[1]


@pytest.mark.parametrize(("rank", "wanted"), [(128, 1_179_648), (256, 2_359_296)])
def test_bytes_are_those_of_the_layout(rank: int, wanted: int) -> None:
    assert 4 * LatentSpec(rank, 0.9, 4, 2, 0.25, 32).nbytes(4096, 256, 2) == wanted


def test_bytes_held_are_those_of_the_estimate() -> None:
    tokens = random_tokens(600, heads=4, dtype=mx.bfloat16)
    cache = filled(tokens)
    assert cache.nbytes == held(config_of(), shape_of(tokens), 600).nbytes
    assert cache.projection_bytes == 2 * 4 * 64 * cache.rank * 2
    half = filled(tokens, palu_quantize_values=False)
    assert same(held_rows(half)[1], tokens.values)


def test_a_row_is_projected_alike_however_many_come_with_it() -> None:
    x, basis = mx.random.normal((1, 2, 96, 64)), mx.random.normal((1, 2, 64, 20))
    whole = project(x, basis)
    for n in (1, 7, 32, 50):
        assert same(project(x[:, :, :n], basis), whole[:, :, :n])


def test_a_rewound_cache_goes_on() -> None:
    tokens = correlated(T + 20)
    cache = filled(tokens)
    assert cache.trim(50) == 50
    fresh = filled(tokens.cut(0, T - 30))
    assert [s.length for s in cache.layout()] == [s.length for s in fresh.layout()]
    assert cache.nbytes == fresh.nbytes
    feed(cache, tokens.cut(T - 30, T + 20))
    assert cache.offset == T + 20
