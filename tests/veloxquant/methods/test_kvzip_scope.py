"""kvzip with one threshold for all layers and heads of a sequence."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, attend, random_tokens, same_state, shape_of, worst
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.architectures import prompt, tiny
from veloxquant.cache.builder import build_layer, new_caches, plan_model
from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import groups_for
from veloxquant.cache.shared_threshold import rows_above
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import KVzipOptions
from veloxquant.core.exceptions import CacheStateError
from veloxquant.methods.kvzip import kvzip_compress, layer_groups

LAYERS, HEADS, MEAN, SINKS, RECENT = 4, 2, 32, 4, 2
CONFIG = KVCacheConfig(method="kvzip", options=KVzipOptions(kvzip_budget=MEAN, kvzip_scope="model"))
SHARPNESS = (0.2, 1.0, 3.0, 0.5)


def layer_tokens(length: int, seed: int = 0, batch: int = 1) -> list[Tokens]:
    """Layers whose queries are more or less picky, so that their scores differ in size."""
    out = [random_tokens(length, seed=seed + i, batch=batch) for i in range(LAYERS)]
    return [t._replace(queries=f * t.queries) for t, f in zip(out, SHARPNESS, strict=True)]


def fresh(shape, *, views: bool = True) -> list:
    groups = groups_for(lambda n: layer_groups(CONFIG, n), [shape] * LAYERS, [None] * LAYERS)
    contexts = (LayerContext(i, LAYERS, views=views, group=groups[i]) for i in range(LAYERS))
    return [build_layer(CONFIG, shape, context) for context in contexts]


def read(caches: list, tokens: list[Tokens], cuts: tuple[int, ...]) -> list:
    for start, stop in zip((0, *cuts), cuts, strict=False):
        for cache, own in zip(caches, tokens, strict=True):
            mx.eval(attend(cache, own.cut(start, stop)))
    for cache in caches:
        cache.commit()
    return caches


def compressed(length: int = 120, cuts: tuple[int, ...] = (119, 120), seed: int = 0) -> list:
    tokens = layer_tokens(length, seed)
    return read(fresh(shape_of(tokens[0])), tokens, cuts)


def scores(length: int = 120) -> np.ndarray:
    """(layers, heads, n) before anything goes; rows that stay in any case at infinity."""
    config = CONFIG.with_fields(kvzip_budget=1000)
    out = []
    for own in layer_tokens(length):
        cache = build_layer(config, shape_of(own), LayerContext(views=True))
        mx.eval(attend(cache, own.cut(0, length - 1)), attend(cache, own.cut(length - 1, length)))
        out.append(np.array(cache.columns["mass"])[0])
    found = np.stack(out)
    found[..., :SINKS] = found[..., -RECENT:] = np.inf
    return found


def owned(cache) -> list[list[int]]:
    """Positions of the rows of each head."""
    stops = np.cumsum(np.array(cache.head_rows)[0])[:-1]
    slots = np.array(cache.kept_positions())[0, :, : cache.pool_rows].reshape(-1)
    return [part.tolist() for part in np.split(slots, stops)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(6, 20), st.integers(0, 3), st.integers(0, 99)
)
def test_shares_are_those_of_one_threshold(
    layers: int, heads: int, n: int, levels: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(layers, 1, heads, n)).astype(np.float32)
    if levels:  # many ties
        values = np.round(values * levels) / levels
    mean = int(rng.integers(1, n + 1))
    got = rows_above([mx.array(v) for v in values], mean)
    order = np.argsort(-values.reshape(-1), kind="stable")[: mean * layers * heads]
    counts = np.bincount(order // (heads * n), minlength=layers)
    assert sum(got) == mean * layers
    assert max(abs(g - c / heads) for g, c in zip(got, counts, strict=True)) < 1


@pytest.mark.parametrize("cuts", [(119, 120), (17, 40, 90, 119, 120)])
def test_kept_rows_are_the_best_of_all_layers_and_heads(cuts: tuple[int, ...]) -> None:
    caches = compressed(cuts=cuts)
    sizes = [c.size() for c in caches]
    assert sum(sizes) == LAYERS * MEAN
    assert len(set(sizes)) > 1
    assert {c.fidelity for c in caches} == {"exact"}
    found = scores()
    order = np.argsort(-found.reshape(-1), kind="stable")[: LAYERS * HEADS * MEAN]
    wanted = np.zeros(found.size, dtype=bool)
    wanted[order] = True
    wanted = wanted.reshape(found.shape)
    for own, cache, truth in zip(found, caches, wanted, strict=True):
        kept = np.zeros_like(truth)
        for head, places in enumerate(owned(cache)):
            assert places == sorted(set(places))
            kept[head, places] = True
        assert kept[:, :SINKS].all()
        assert kept[:, -RECENT:].all()
        # Rounding to whole numbers a head moves fewer rows than there are heads.
        assert (kept != truth).sum() < HEADS
        assert kept.sum() == HEADS * cache.pool_rows
        assert own[kept].min() >= own[~kept].max()


def test_decoding_attends_to_each_heads_own_rows() -> None:
    caches, tokens, more = compressed(), layer_tokens(120), layer_tokens(9, seed=40)
    for cache, own, new in zip(caches, tokens, more, strict=True):
        for start, stop in [(0, 1), (1, 6), (6, 9)]:
            got = attend(cache, new.cut(start, stop))
            for head, places in enumerate(owned(cache)):
                rows = mx.array(places)
                k, v = (
                    mx.concatenate(
                        [a[:, head : head + 1][:, :, rows], b[:, head : head + 1, :stop]], 2
                    )
                    for a, b in ((own.keys, new.keys), (own.values, new.values))
                )
                q = new.queries[:, 2 * head : 2 * head + 2, start:stop]
                want = mx.fast.scaled_dot_product_attention(q, k, v, scale=64**-0.5, mask="causal")
                assert worst(got[:, 2 * head : 2 * head + 2], want) < 1e-5
        assert cache.size() == cache.pool_rows + 9
        assert sorted(cache.columns) == ["positions"]


def test_bytes_are_those_of_the_rows() -> None:
    caches = compressed()
    exact = 2 * HEADS * 64 * 4
    for cache in caches:
        assert cache.kept_bytes == cache.pool_rows * exact
        positions = HEADS * cache.pool_rows * 4
        assert cache.nbytes <= (cache.pool_rows + 64) * exact + positions + 4 * HEADS
        assert not cache.board.notes


def test_a_state_goes_on_and_later_prompts_only_add() -> None:
    caches, more = compressed(), layer_tokens(40, seed=50)
    twins = fresh(shape_of(more[0]))
    for twin, cache in zip(twins, caches, strict=True):
        twin.state = cache.state
    for group in (caches, twins):
        read(group, more, (38, 39, 40))
    for twin, cache, size in zip(twins, caches, [c.size() for c in compressed()], strict=True):
        same_state(twin, cache)
        assert cache.size() == size + 40
        assert twin.attention.ring.queries is None
    saved = caches[0].extra_state()
    saved[-3] = saved[-3] + 1
    with pytest.raises(CacheStateError, match="counts of heads"):
        twins[0].restore_extra(saved)


def test_sequences_share_nothing() -> None:
    tokens = layer_tokens(120)
    caches = fresh(shape_of(tokens[0]))
    read(caches, [t.cut(0, 60) for t in tokens], (60,))
    twins = copy.deepcopy(caches)
    other = layer_tokens(60, seed=70)[::-1]
    read(twins, other, (59, 60))
    read(caches, [t.cut(60, 120) for t in tokens], (59, 60))
    assert [owned(c) for c in caches] == [owned(c) for c in compressed()]
    assert sum(c.size() for c in twins) == LAYERS * MEAN


def test_without_the_others_or_the_hook_heads_keep_equal_numbers_and_say_so() -> None:
    tokens = layer_tokens(120)
    shape = shape_of(tokens[0])
    (alone,) = read(
        [build_layer(CONFIG, shape, LayerContext(2, 1, views=True))], [tokens[2]], (119, 120)
    )
    assert (alone.size(), alone.fidelity) == (MEAN, "exact")
    unseen = read(fresh(shape, views=False), tokens, (119, 120))
    assert [c.size() for c in unseen] == [MEAN] * LAYERS
    assert {c.fidelity for c in unseen} == {"proxy"}
    assert all(c.head_rows is None for c in unseen)
    torn = fresh(shape)
    read(torn[:3], tokens[:3], (119, 120))
    assert [c.size() for c in torn[:3]] == [MEAN] * 3
    assert {c.fidelity for c in torn[:3]} == {"proxy"}
    pairs = layer_tokens(120, batch=2)
    both = read(fresh(shape), pairs, (119, 120))
    assert [c.size() for c in both] == [MEAN] * LAYERS
    assert {c.fidelity for c in both} == {"proxy"}


def test_a_model_repeats_its_prompt_for_all_layers_together() -> None:
    class Words:
        chat_template = None

        def encode(self, text: str, **_: object) -> list[int]:
            return [ord(c) % 50 for c in text]

    model, ids = tiny("llama"), prompt(90, 1)
    config = CONFIG.with_fields(kvzip_probe="reconstruct")
    caches = new_caches(plan_model(model, config), config)
    mx.eval(model(mx.array([ids]), cache=caches))
    kvzip_compress(model, caches, ids, Words())
    assert sum(c.size() for c in caches) == len(caches) * MEAN
    assert {c.fidelity for c in caches} == {"exact"}
    mx.eval(model(mx.array([[5]]), cache=caches))
    with pytest.raises(CacheStateError, match="before its tokens are evicted"):
        caches[0].begin_probe(0, 10)
