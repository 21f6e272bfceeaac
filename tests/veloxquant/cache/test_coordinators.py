"""Groups of layers: who codes when, copies that stay together, rewinding, memory, odd layers."""

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import (
    Tokens,
    attend,
    held_rows,
    random_tokens,
    same,
    same_state,
    shape_of,
    small_config,
    worst,
)

from veloxquant.cache.batch import RowBatch
from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup, groups_for, same_encoding
from veloxquant.cache.layouts.latent import GROUPS, PLANS
from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.sizes import LayerShape

METHODS = ("xquant", "minicache", "xkv")
every_method = pytest.mark.parametrize("method", METHODS)
LENGTH = {"xquant": 150, "minicache": 200, "xkv": 620}


def config_of(method: str) -> KVCacheConfig:
    return KVCacheConfig(method=method)


def alike(layers: int, length: int, seed: int = 0, **kwargs: Any) -> list[Tokens]:
    """Layers that resemble each other, as neighbours in a model do."""
    first = random_tokens(length, seed=seed, **kwargs)
    out = [first]
    for i in range(1, layers):
        other = random_tokens(length, seed=seed + 100 * i, **kwargs)
        mixed = (a + 0.2 * b for a, b in zip(first, other, strict=True))
        out.append(Tokens(*(m.astype(first.keys.dtype) for m in mixed)))
    return out


def group_of(method: str, layers: list[Tokens]) -> list[Any]:
    group = LayerGroup(len(layers))
    return [
        build_layer(config_of(method), shape_of(t), LayerContext(layer=i, group=group, views=True))
        for i, t in enumerate(layers)
    ]


def step(caches: list[Any], layers: list[Tokens], start: int, stop: int) -> list[mx.array]:
    """One forward pass: the layers one after the other."""
    outs = [attend(c, t.cut(start, stop)) for c, t in zip(caches, layers, strict=True)]
    mx.eval(outs)
    return outs


def fed(method: str, layers: list[Tokens], size: int = 64, stop: int | None = None) -> list[Any]:
    caches = group_of(method, layers)
    stop = stop or layers[0].length
    for start in range(0, stop, size):
        step(caches, layers, start, min(start + size, stop))
    return caches


def alike_states(left: list[Any], right: list[Any]) -> None:
    for a, b in zip(left, right, strict=True):
        same_state(a, b)


@every_method
def test_state_does_not_depend_on_how_a_prompt_is_cut(method: str) -> None:
    layers = alike(2, LENGTH[method], seed=1)
    whole = fed(method, layers, layers[0].length)
    for size in (7, 64):
        alike_states(fed(method, layers, size), whole)
    assert all(c.keys_stream.body.length for c in whole)


@every_method
def test_fresh_rows_are_exact_until_all_layers_have_them(method: str) -> None:
    layers = alike(2, LENGTH[method], seed=2)
    caches = group_of(method, layers)
    first = attend(caches[0], layers[0])
    caches[0].commit()
    assert caches[0].keys_stream.body.length == 0
    for got, wanted in zip(held_rows(caches[0]), layers[0][1:], strict=True):
        assert same(got, wanted)
    mx.eval(first)
    attend(caches[1], layers[1])
    caches[1].commit()
    assert caches[0].keys_stream.body.length == caches[1].keys_stream.body.length > 0


@every_method
@pytest.mark.parametrize("layers", [1, 2])
def test_attention_reads_what_is_held(method: str, layers: int) -> None:
    tokens = alike(layers, LENGTH[method] + 1, seed=3)
    n = LENGTH[method]
    caches = fed(method, tokens, stop=n)
    for cache, token in zip(caches, tokens, strict=True):
        out = attend(cache, token.cut(n, n + 1))
        keys, values = held_rows(cache)
        q = token.queries[:, :, n:]
        wanted = mx.fast.scaled_dot_product_attention(q, keys, values, scale=q.shape[-1] ** -0.5)
        assert worst(out, wanted) < 1e-4


@every_method
def test_a_reading_layer_holds_no_codes_of_its_own(method: str) -> None:
    layers = alike(2, LENGTH[method], seed=4)
    caches = fed(method, layers)
    for cache in caches:
        cache.commit()
    owner, reader = caches
    shared = [name for name in owner.keys_stream.body._arrays if name[0] in "we01"]
    assert shared
    own = reader.keys_stream.body._arrays
    assert not [n for n in shared if n in own]


@every_method
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_bytes_are_those_of_the_plan(method: str, dtype: mx.Dtype) -> None:
    layers = alike(2, LENGTH[method], seed=5, dtype=dtype)
    caches = fed(method, layers)
    for i, cache in enumerate(caches):
        _ = cache.state
        plan = PLANS[method](config_of(method), i, 2)
        wanted = plan.nbytes(shape_of(layers[0]), layers[0].length)
        assert cache.nbytes == wanted


@every_method
def test_memory_is_what_the_layers_say(method: str) -> None:
    layers = alike(2, LENGTH[method], seed=6)
    fed(method, layers)
    gc.collect()
    mx.synchronize()
    base = mx.get_active_memory()
    caches = fed(method, layers)
    mx.eval([a for c in caches for a in c.arrays()])
    caches[0].group.settle()
    mx.eval([a for c in caches for a in c.arrays()])
    gc.collect()
    mx.synchronize()
    growth, said = mx.get_active_memory() - base, sum(c.nbytes for c in caches)
    assert abs(growth - said) <= 0.05 * said + (64 << 10)
    del caches
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() - base <= 64 << 10, "something published is still held"


@every_method
@pytest.mark.parametrize("n", [1, 22, 86, 150])
def test_rewinding_all_layers_leaves_the_layout_of_the_kept_tokens(method: str, n: int) -> None:
    layers, more = alike(2, LENGTH[method], seed=7), alike(2, 70, seed=8)
    caches = fed(method, layers)
    assert [c.trim(n) for c in caches] == [n, n]
    kept = layers[0].length - n
    fresh = fed(method, layers, stop=kept) if kept else group_of(method, layers)
    fresh[0].group.settle()
    for a, b in zip(caches, fresh, strict=True):
        assert a.offset == b.offset == kept
        assert a.nbytes == b.nbytes
    for start in range(0, 70, 9):
        step(caches, more, start, min(start + 9, 70))
        step(fresh, more, start, min(start + 9, 70))
    for a, b in zip(caches, fresh, strict=True):
        assert [s.length for s in a.layout()] == [s.length for s in b.layout()]


@every_method
def test_rewinding_layers_by_different_numbers_is_refused(method: str) -> None:
    caches = fed(method, alike(2, LENGTH[method], seed=9))
    caches[0].trim(3)
    with pytest.raises(CacheStateError, match="rewind all layers alike"):
        caches[1].trim(4)


@every_method
def test_more_than_everything_can_be_asked_for(method: str) -> None:
    caches = fed(method, alike(2, LENGTH[method], seed=10))
    assert [c.trim(10_000) for c in caches] == [LENGTH[method]] * 2
    assert all(c.offset == 0 and c.nbytes == 0 for c in caches)


@every_method
@pytest.mark.parametrize("way", ["list", "singly", "reversed", "batch"])
def test_copies_of_layers_belong_together(method: str, way: str) -> None:
    n = LENGTH[method]
    layers, left, right = alike(2, n, seed=11), alike(2, 140, seed=12), alike(2, 140, seed=13)
    caches = fed(method, layers)
    if way == "list":
        twins = copy.deepcopy(caches)
    elif way == "singly":
        twins = [copy.deepcopy(c) for c in caches]
    elif way == "reversed":
        twins = [copy.deepcopy(c) for c in reversed(caches)][::-1]
    else:
        twins = [RowBatch.merge([c]).extract(0) for c in caches]
    assert twins[0].group is twins[1].group is not caches[0].group
    for start in range(0, 140, 35):
        step(caches, left, start, start + 35)
        step(twins, right, start, start + 35)
    for some, own in ((caches, left), (twins, right)):
        alone = fed(method, layers)
        for start in range(0, 140, 35):
            step(alone, own, start, start + 35)
        alike_states(some, alone)


@every_method
def test_two_copies_at_once_do_not_mix(method: str) -> None:
    caches = fed(method, alike(2, LENGTH[method], seed=14))
    first, second = copy.deepcopy(caches[0]), copy.deepcopy(caches[0])
    assert copy.deepcopy(caches[1]).group is first.group
    assert copy.deepcopy(caches[1]).group is second.group


@every_method
def test_every_row_of_a_batch_has_its_own_group(method: str) -> None:
    n = LENGTH[method]
    rows = [alike(2, n, seed=15), alike(2, n - 40, seed=16)]
    caches = [fed(method, row) for row in rows]
    batch = [RowBatch.merge([row[i] for row in caches]) for i in range(2)]
    later = [alike(2, 40, seed=17), alike(2, 40, seed=18)]
    for at in range(40):
        for i, layer in enumerate(batch):
            one = Tokens(
                *(
                    mx.concatenate(list(p), axis=0)
                    for p in zip(*(r[i].cut(at, at + 1) for r in later), strict=True)
                )
            )
            mx.eval(attend(layer, one))
    batch[0].filter([1])
    batch[1].filter([1])
    alone = fed(method, rows[1])
    for at in range(40):
        step(alone, later[1], at, at + 1)
    alike_states([batch[0].extract(0), batch[1].extract(0)], alone)


@every_method
def test_states_go_to_layers_of_another_group(method: str) -> None:
    n = LENGTH[method]
    layers = alike(2, n + 70, seed=19)
    caches = fed(method, layers, stop=n)
    twins = group_of(method, layers)
    for twin, cache in zip(twins, caches, strict=True):
        twin.state = cache.state
    for start in range(n, n + 70, 10):
        for a, b in zip(
            step(caches, layers, start, start + 10),
            step(twins, layers, start, start + 10),
            strict=True,
        ):
            assert same(a, b)
    alike_states(caches, twins)
    with pytest.raises(CacheStateError, match="of its group"):
        group_of(method, layers[:1])[0].state = caches[1].state


@every_method
def test_sequences_of_a_cache_do_not_influence_one_another(method: str) -> None:
    both = alike(2, LENGTH[method], seed=20, batch=2)
    together = fed(method, both)
    for i in range(2):
        alone = fed(method, [t.row(i) for t in both])
        for a, b in zip(together, alone, strict=True):
            for x, y in zip(held_rows(a), held_rows(b), strict=True):
                assert worst(x[i : i + 1], y) < 1e-5


@every_method
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_every_layer_is_in_one_group(method: str, n: int) -> None:
    groups = GROUPS[method](config_of(method), n)
    assert [i for g in groups for i in g] == list(range(n))
    assert max(map(len, groups)) <= 2
    start = n - n // 2 if method == "minicache" else 0
    assert all(len(g) == 1 for g in groups if g[0] < start)


def test_layers_that_differ_are_not_grouped() -> None:
    from mlx.nn import RoPE

    one, other = LayerShape(4, 2, 64, 64), LayerShape(4, 2, 128, 128)
    split = lambda n: [tuple(range(n))]  # noqa: E731 - two lines would say no more
    assert len(set(map(id, groups_for(split, [one, one], [None, None])))) == 1
    assert len(set(map(id, groups_for(split, [one, other], [None, None])))) == 2
    local, far = RoPE(64, base=10_000), RoPE(64, base=1_000_000)
    assert same_encoding(local, RoPE(64, base=10_000))
    assert not same_encoding(local, far)
    assert len(set(map(id, groups_for(split, [one, one], [local, far])))) == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_ended_is_gone_without_a_search_for_cycles(method):
    group = LayerGroup(2)
    tokens = random_tokens(40)
    config = small_config(TABLE[method])
    layers = [
        build_layer(config, shape_of(tokens), LayerContext(layer=i, n_layers=2, group=group))
        for i in range(2)
    ]
    for layer in layers:
        layer.update_and_fetch(tokens.keys, tokens.values)
    watched = [weakref.ref(one) for one in (*layers, *copy.deepcopy(layers))]
    gc.disable()
    try:
        del layers, layer, group
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()
