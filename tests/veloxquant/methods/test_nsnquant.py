"""nsnquant: what is exact, bytes, refusals."""

import mlx.core as mx
import pytest
from cache_lab import feed, held_rows, new_cache, random_tokens, same, shape_of, worst

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import NSNQuantOptions
from veloxquant.core.exceptions import QuantizerConfigError


def cache_of(tokens, **options):
    given = NSNQuantOptions(**options) if options else None
    return new_cache(KVCacheConfig(method="nsnquant", options=given), shape_of(tokens))


@pytest.mark.parametrize("total", [1, 63, 64, 65, 150])
def test_the_rest_of_a_chunk_is_the_input(total: int) -> None:
    tokens = random_tokens(total, seed=1)
    cache = cache_of(tokens)
    feed(cache, tokens, 20)
    cache.commit()
    done = total // 64 * 64
    assert cache.quantized_tokens == done
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, done:], true[:, :, done:])


@pytest.mark.parametrize(("bits", "per_token"), [(1, 24), (2, 40)])
def test_bytes(bits: int, per_token: int) -> None:
    tokens = random_tokens(256, heads=2, k_dim=128, dtype=mx.bfloat16)
    cache = cache_of(tokens, nsn_bits=bits)
    feed(cache, tokens, 100)
    cache.commit()
    assert cache.nbytes == 2 * 2 * 256 * per_token
    assert cache.residual_fp16_bytes == 0


@pytest.mark.parametrize(("bits", "error"), [(1, 0.33), (2, 0.098)])
def test_error_by_width(bits: int, error: float) -> None:
    tokens = random_tokens(256, seed=2)
    cache = cache_of(tokens, nsn_bits=bits)
    feed(cache, tokens)
    cache.commit()
    lost = mx.square(held_rows(cache)[1] - tokens.values).mean().item()
    assert 0.9 * error < lost < 1.03 * error


def test_constant_values_are_kept() -> None:
    """The mean of a chunk carries what does not change."""
    tokens = random_tokens(128, seed=3)
    steady = tokens._replace(values=mx.broadcast_to(tokens.values[:, :, :1], tokens.values.shape))
    cache = cache_of(tokens)
    feed(cache, steady)
    cache.commit()
    assert worst(held_rows(cache)[1], steady.values) < 1e-4


def test_it_grows_past_its_maximum_and_seeds_differ() -> None:
    tokens = random_tokens(200, seed=4)
    cache = cache_of(tokens, nsn_residual_length=32, nsn_max_ctx=32, nsn_subvector_dim=4,
                     nsn_codebook_size=16, nsn_seed=5)  # fmt: skip
    feed(cache, tokens, 50)
    assert cache.offset == 200
    other = cache_of(tokens, nsn_residual_length=32, nsn_subvector_dim=4, nsn_codebook_size=16)
    feed(other, tokens, 50)
    assert not same(held_rows(cache)[0], held_rows(other)[0])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"nsn_codebook_size": 128}, "nsn_codebook_size=128"),
        ({"nsn_subvector_dim": 4}, "nsn_codebook_size=256"),
        ({"nsn_subvector_dim": 7, "nsn_codebook_size": 128}, "nsn_subvector_dim=7"),
        ({"nsn_residual_length": 8}, "nsn_residual_length=8"),
        ({"nsn_max_ctx": 32}, "nsn_max_ctx=32"),
        ({"nsn_bits": 3}, "nsn_bits=3"),
    ],
)
def test_what_does_not_go_together_is_refused(options, field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        cache_of(random_tokens(1), **options)
