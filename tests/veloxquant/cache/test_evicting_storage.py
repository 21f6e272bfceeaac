"""Rows that stay after an eviction, packed."""

import mlx.core as mx
import pytest
from cache_lab import (
    Ragged,
    attend,
    feed,
    held_rows,
    new_cache,
    plan_of,
    random_tokens,
    same_state,
    shape_of,
    small_config,
    worst,
)

from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.table import TABLE, held
from veloxquant.config.checks.eviction import STORABLE
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError

ERRORS = {"affine8": 0.12, "affine4": 2.0, "turboquant4": 2.0}
every_form = pytest.mark.parametrize("form", ERRORS)
every_method = pytest.mark.parametrize("name", sorted(STORABLE))


@every_method
@every_form
def test_packed_rows_take_what_the_estimate_says_however_they_came(name: str, form: str) -> None:
    tokens = random_tokens(101, seed=1, dtype=mx.bfloat16)
    config = small_config(TABLE[name], eviction_storage=form)
    shape = shape_of(tokens)
    caches = []
    for size in (7, 64):
        cache = new_cache(config, shape)
        feed(cache, tokens.cut(0, 100), size)
        attend(cache, tokens.cut(100, 101))
        cache.commit()
        wanted = held(config, shape, 101)
        assert cache.size() == wanted.rows == 32
        assert abs(cache.nbytes - wanted.nbytes) <= 0.04 * wanted.nbytes
        assert cache.nbytes < 0.65 * held(small_config(TABLE[name]), shape, 101).nbytes
        caches.append(cache)
    same_state(*caches)


@every_method
@every_form
def test_kept_rows_are_the_fed_ones_but_for_rounding(name: str, form: str) -> None:
    tokens = random_tokens(90, seed=2)
    cache = new_cache(small_config(TABLE[name], eviction_storage=form), shape_of(tokens))
    feed(cache, tokens.cut(0, 80))
    feed(cache, tokens.cut(80, 90), 1)
    cache.commit()
    places = cache.kept_positions()[..., None]
    places = mx.broadcast_to(places, (1, 2, *places.shape[2:]))
    for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert worst(rows, mx.take_along_axis(true, places, axis=2)) < ERRORS[form]


@every_form
def test_picking_rows_does_not_code_them_anew(form: str) -> None:
    """A row that was packed once stays as it is over many evictions."""
    tokens = random_tokens(200, seed=3)
    cache = new_cache(small_config(TABLE["h2o"], eviction_storage=form), shape_of(tokens))
    feed(cache, tokens.cut(0, 60))
    feed(cache, tokens.cut(60, 70), 1)
    first = held_rows(cache)[0][:, :, :4]
    feed(cache, tokens.cut(70, 200), 1)
    assert worst(held_rows(cache)[0][:, :, :4], first) == 0


@every_form
def test_packed_rows_are_saved_and_batched(form: str, tmp_path) -> None:
    config = small_config(TABLE["tova"], eviction_storage=form)
    rows = [random_tokens(n, seed=n) for n in (60, 33)]
    ragged = Ragged(config, rows)
    ragged.prompt(25)
    step = random_tokens(3, seed=4, batch=2)
    out = feed(ragged.batch, step, 1)
    for i, tokens in enumerate(rows):
        alone = new_cache(config, shape_of(tokens))
        feed(alone, tokens, 25)
        assert worst(out[i : i + 1], feed(alone, step.row(i), 1)) < 1e-5
        save_caches(tmp_path / str(i), [alone], config)
        (back,) = load_caches(tmp_path / str(i), plan_of(shape_of(tokens), 1), config)
        same_state(back, alone)


def test_an_unknown_form_and_a_method_that_changes_rows_are_refused() -> None:
    shape = shape_of(random_tokens(1))
    with pytest.raises(QuantizerConfigError, match="exact, affine8, affine4, turboquant4"):
        new_cache(KVCacheConfig(method="h2o", eviction_storage="zip"), shape)
    for name in ("kivi", "cam", "streaming_llm"):
        with pytest.raises(QuantizerConfigError, match=f"'exact' with method '{name}'"):
            new_cache(KVCacheConfig(method=name, eviction_storage="affine4"), shape)
