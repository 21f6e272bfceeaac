"""svdq: what latents lose, which bits they get, and that nothing hangs on how a prompt is cut."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SVDqOptions
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec
from veloxquant.quantizers.specs.latent import ScheduledSpec, even_bounds, rank_for

T = 320


def decaying(tokens: int = T, dim: int = 64, dtype: mx.Dtype = mx.float32) -> Tokens:
    """Keys whose i-th direction has the spread 1/i, turned at random."""
    draws = mx.random.split(mx.random.key(3), 4)
    turn, _ = mx.linalg.qr(mx.random.normal((dim, dim), key=draws[0]), stream=mx.cpu)
    spread = 1 / mx.arange(1, dim + 1).astype(mx.float32)
    keys = (mx.random.normal((1, 2, tokens, dim), key=draws[1]) * spread) @ turn.T
    values = mx.random.normal((1, 2, tokens, dim), key=draws[2])
    queries = mx.random.normal((1, 4, tokens, dim), key=draws[3])
    return Tokens(*(a.astype(dtype) for a in (queries, keys, values)))


def filled(tokens: Tokens, size: int = 128, **options: Any) -> Any:
    config = KVCacheConfig(method="svdq", options=SVDqOptions(**options))
    cache = new_cache(config, shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


def energy(x: mx.array) -> float:
    total: Any = mx.square(x).sum().item()
    return total


def lost(cache: Any, tokens: Tokens) -> float:
    return energy(held_rows(cache)[0] - tokens.keys) / energy(tokens.keys)


def test_all_directions_at_eight_bits_lose_almost_nothing() -> None:
    tokens = decaying()
    cache = filled(tokens, svdq_rank=64, svdq_bit_schedule=(8,) * 8)
    assert worst(held_rows(cache)[0], tokens.keys) < 2e-2
    assert worst(held_rows(cache)[1], tokens.values) == 0


def test_more_directions_and_more_bits_never_lose_more() -> None:
    tokens = decaying()
    by_rank = [lost(filled(tokens, svdq_rank=r), tokens) for r in (8, 16, 32, 64)]
    assert by_rank == sorted(by_rank, reverse=True)
    schedules = ((2, 2, 0, 0), (4, 2, 0, 0), (4, 4, 2, 0), (8, 4, 2, 2))
    by_bits = [lost(filled(tokens, svdq_rank=64, svdq_bit_schedule=s), tokens) for s in schedules]
    assert by_bits == sorted(by_bits, reverse=True)


def test_at_two_bits_on_average_it_beats_channels_of_their_own() -> None:
    tokens = decaying()
    mine = lost(filled(tokens, svdq_rank=64), tokens)
    codec = codec_for(AffineChannelSpec(2, 32), 64)
    rows = tokens.keys
    got = codec.decode(codec.encode(rows), mx.float32)
    theirs = energy(got - rows) / energy(rows)
    assert mine * 5 <= theirs


def test_directions_are_orthonormal_and_latents_uncorrelated() -> None:
    rows = decaying().keys[:, :, :256]
    spec = ScheduledSpec(64, 1.0, (8,), 32)
    fitted = codec_for(spec, 64).fit(rows)  # type: ignore[attr-defined]
    basis = fitted["basis"]
    unit = basis.swapaxes(-1, -2) @ basis
    assert worst(unit, mx.broadcast_to(mx.eye(64), unit.shape)) < 1e-4
    latents = (rows - fitted["mean"]) @ basis
    covariance = latents.swapaxes(-1, -2) @ latents / 256
    diagonal = mx.diagonal(covariance, axis1=-2, axis2=-1)
    bound = mx.sqrt(diagonal[..., :, None] * diagonal[..., None, :])
    apart = mx.abs(covariance) * (1 - mx.eye(64)) / bound
    assert (apart.max() < 1e-2).item()


def test_a_common_vector_changes_neither_codes_nor_attention() -> None:
    tokens = decaying()
    away = mx.random.normal((1, 2, 1, 64), key=mx.random.key(9)) * 3
    moved = tokens._replace(keys=tokens.keys + away)
    left, right = filled(tokens), filled(moved)
    error = held_rows(left)[0] + away - held_rows(right)[0]
    assert energy(error) / error.size < 4e-6
    now = random_tokens(1, seed=4)
    outs = [
        attend(cache, now._replace(keys=now.keys + shift))
        for cache, shift in ((left, 0 * away), (right, away))
    ]
    assert worst(*outs) < 2e-2


def test_products_never_differ_from_those_of_unpacked_rows() -> None:
    tokens = decaying()
    cache = filled(tokens)
    keys, values = held_rows(cache)
    now = random_tokens(1, seed=5)
    out = attend(cache, now)
    keys = mx.concatenate([keys, now.keys], axis=2)
    values = mx.concatenate([values, now.values], axis=2)
    wanted = mx.fast.scaled_dot_product_attention(now.queries, keys, values, scale=0.125)
    assert worst(out, wanted) < 1e-4
    store = cache.keys_stream.body
    w = mx.random.normal((1, 2, 3, store.length))
    assert worst(store.mix(w), w @ store.decode(0, store.length, mx.float32)) < 1e-3


def test_state_does_not_depend_on_how_a_prompt_is_cut() -> None:
    tokens = decaying()
    whole = filled(tokens, T)
    assert whole.keys_stream.body.length == T
    for size in (7, 64):
        same_state(filled(tokens, size), whole)


@pytest.mark.parametrize("n", [1, 40, 100, T])
def test_rewinding_keeps_the_basis_while_codes_are_left(n: int) -> None:
    tokens = decaying()
    cache = filled(tokens)
    basis = cache.keys_stream.body.fitted["basis"]
    assert cache.trim(n) == n
    kept = cache.keys_stream.body.length
    assert kept == ((T - n) // 32 * 32 if T - n >= 256 else 0)
    if kept:
        assert cache.keys_stream.body.fitted["basis"] is basis
    feed(cache, tokens.cut(T - n, T))
    cache.commit()
    assert cache.keys_stream.body.length == T


def test_groups_of_latents() -> None:
    assert even_bounds(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert even_bounds(3, 8) == ((0, 1), (1, 2), (2, 3))
    assert rank_for(None, 0.95, 128) == 122
    assert rank_for(200, 0.95, 128) == 128
    spec = ScheduledSpec(128, 1.0, (8, 4, 2, 1, 1, 0, 0, 0), 32)
    assert spec.parts(128) == ((8, 0, 16), (4, 16, 32), (2, 32, 48), (1, 48, 80))
    assert sum(bits * (stop - start) for bits, start, stop in spec.parts(128)) / 128 == 2.0
    assert ScheduledSpec(3, 1.0, (8, 4, 2, 1), 32).parts(64) == ((8, 0, 1), (4, 1, 2), (2, 2, 3))


@pytest.mark.parametrize(("rank", "wanted"), [(128, 192_768), (64, 96_512)])
def test_bytes_of_keys_are_those_of_the_layout(rank: int, wanted: int) -> None:
    spec = ScheduledSpec(rank, 0.95, (8, 4, 2, 1, 1, 0, 0, 0), 32)
    assert spec.nbytes(4096, 128, 2) == wanted


def test_bytes_held_are_those_of_the_estimate() -> None:
    tokens = decaying(300, dtype=mx.bfloat16)
    cache = filled(tokens)
    assert cache.nbytes == held(KVCacheConfig(method="svdq"), shape_of(tokens), 300).nbytes
    assert cache.value_fp16_bytes == cache.values_stream.body.nbytes
    assert cache.rank == 61
