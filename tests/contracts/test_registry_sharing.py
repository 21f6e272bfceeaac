"""Every ready row of the method table: batches, copies, states and files."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import (
    Ragged,
    T,
    Tokens,
    attend,
    every_row,
    fed,
    feed,
    new_cache,
    plan_of,
    random_tokens,
    same,
    same_state,
    shape_of,
    small,
    small_config,
    state_parts,
    worst,
)

from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.table import MethodRow
from veloxquant.core.exceptions import CacheStateError

# ---- many sequences -------------------------------------------------------------------------


@every_row
def test_sequences_of_one_cache_do_not_influence_one_another(row: MethodRow) -> None:
    both = random_tokens(T + 1, seed=18, batch=2)
    together = small(row, both)
    out = feed(together, both.cut(0, T), 50)
    step = attend(together, both.cut(T, T + 1))
    tree, arrays = state_parts(together)
    for i in range(2):
        alone = small(row, both)
        one = both.row(i)
        assert worst(out[i : i + 1], feed(alone, one.cut(0, T), 50)) < 1e-5
        assert worst(step[i : i + 1], attend(alone, one.cut(T, T + 1))) < 1e-5
        for path, single in state_parts(alone)[1].items():
            assert same(arrays[path][i : i + 1], single), path
    assert tree


@every_row
@pytest.mark.parametrize("views", [True, False], ids=["views", "arrays"])
def test_ragged_rows_of_a_batch_equal_single_sequences(row: MethodRow, views: bool) -> None:
    rows = [random_tokens(n, seed=19 + n) for n in (T, 33, 97)]
    steps = [random_tokens(4, seed=20 + n) for n in range(3)]
    ragged = Ragged(small_config(row), rows, views=views)
    outs = ragged.prompt(50)
    later = Tokens(*(mx.concatenate(list(p), axis=0) for p in zip(*steps, strict=True)))
    decoded = feed(ragged.batch, later, 1)
    for i, (tokens, step) in enumerate(zip(rows, steps, strict=True)):
        alone = new_cache(small_config(row), shape_of(tokens), views=views)
        assert worst(outs[i], feed(alone, tokens, 50)) < 1e-5
        assert worst(decoded[i : i + 1], feed(alone, step, 1)) < 1e-5
        assert ragged.batch.offset.tolist()[i] == tokens.length + 4
        same_state(ragged.batch.extract(i), alone)


@every_row
def test_rows_leave_and_join_a_batch(row: MethodRow) -> None:
    rows = [random_tokens(n, seed=n) for n in (40, 60, 80)]
    batch = Ragged(small_config(row), rows[:2])
    batch.prompt(80)
    newcomer = Ragged(small_config(row), rows[2:])
    newcomer.prompt(80)
    batch.batch.extend(newcomer.batch)
    batch.batch.filter([2, 0])
    step = random_tokens(1, seed=21, batch=2)
    out = attend(batch.batch, step)
    for i, tokens in enumerate((rows[2], rows[0])):
        alone = small(row, tokens)
        feed(alone, tokens)
        assert worst(out[i : i + 1], attend(alone, step.row(i))) < 1e-5


# ---- copies, states, files ------------------------------------------------------------------


def state_twin(row: MethodRow, cache: Any, tokens: Tokens) -> Any:
    twin = small(row, tokens)
    twin.state = cache.state
    return twin


@every_row
@pytest.mark.parametrize("way", ["deepcopy", "state", "extract"])
def test_a_copy_and_its_original_go_their_own_ways(row: MethodRow, way: str) -> None:
    tokens = random_tokens(T, seed=22)
    left, right = random_tokens(40, seed=23), random_tokens(40, seed=24)
    cache = fed(row, tokens)
    if way == "state":
        twin = state_twin(row, cache, tokens)
    elif way == "deepcopy":
        twin = copy.deepcopy(cache)
    else:
        twin = type(cache).merge([cache]).extract(0)
    feed(twin, right, 3)
    feed(cache, left, 3)
    for one, own in ((cache, left), (twin, right)):
        alone = fed(row, tokens)
        feed(alone, own, 3)
        same_state(one, alone)


@every_row
def test_a_state_goes_on_as_its_owner_would(row: MethodRow) -> None:
    tokens, more = random_tokens(T, seed=25), random_tokens(40, seed=26)
    cache = fed(row, tokens)
    mx.eval(cache.state)
    twin = state_twin(row, cache, tokens)
    assert twin.offset == cache.offset == T
    assert same(feed(twin, more, 1), feed(cache, more, 1))
    same_state(twin, cache)


@every_row
def test_a_saved_cache_attends_alike(row: MethodRow, tmp_path: Any) -> None:
    layers = [random_tokens(T + 1, seed=27), random_tokens(T + 1, seed=28)]
    more = random_tokens(5, seed=29)
    config = small_config(row)
    caches = [fed(row, tokens) for tokens in layers]
    nbytes = save_caches(tmp_path / "one", caches, config)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    assert nbytes <= sum(c.nbytes for c in caches)
    loaded = load_caches(tmp_path / "one", plan_of(shape_of(layers[0]), 2), config)
    for cache, back in zip(caches, loaded, strict=True):
        assert back.offset == cache.offset
        same_state(back, cache)
        assert worst(feed(back, more, 1), feed(cache, more, 1)) < 1e-5
        same_state(back, cache)
    with pytest.raises(CacheStateError, match="2 layers, this model has 3"):
        load_caches(tmp_path / "one", plan_of(shape_of(layers[0]), 3), config)
