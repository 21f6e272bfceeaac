"""cam: what goes leaves its value to somebody who stays."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_lab import Tokens, attend, feed, held_rows, new_cache, random_tokens, same, shape_of

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.merging import SEQUENTIAL_TARGETS, Losers, gate_probability
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import CaMOptions
from veloxquant.core.exceptions import QuantizerConfigError

BUDGET = 20


def config(mode: str = "sim_weighted", **fields: Any) -> KVCacheConfig:
    options = CaMOptions(cam_budget=BUDGET, cam_n_sink=2, cam_merge=mode, **fields)
    return KVCacheConfig(method="cam", options=options)


def full(tokens: Tokens, setting: KVCacheConfig, context: LayerContext | None = None):
    """A cache that holds just its budget."""
    cache = build_layer(setting, shape_of(tokens), context)
    cache.returns = "views"
    feed(cache, tokens.cut(0, BUDGET), 1)
    return cache


def after_one_loss(cache: Any, tokens: Tokens):
    """Values, keys and places before and after one eviction; the loser's row and its target's."""
    keys, values = (np.array(a) for a in held_rows(cache))
    cache._shrink(BUDGET - 1)
    places = cache.kept_positions()[0, 0].tolist()
    (lost,) = set(range(BUDGET)) - set(places)
    unit = keys[0, 0] / np.linalg.norm(keys[0, 0], axis=-1, keepdims=True)
    cosine = unit @ unit[lost]
    cosine[[0, 1, lost]] = -2
    target = int(cosine.argmax())
    return keys[0, 0], values[0, 0], places, lost, target, float(cosine[target])


@pytest.mark.parametrize("mode", ["mean", "sim_weighted"])
def test_one_loser_goes_into_its_nearest_survivor(mode: str) -> None:
    tokens = random_tokens(BUDGET, seed=1, heads=1, repeat=1)
    cache = full(tokens, config(mode, cam_merge_gate=False))
    mass = np.array(cache.columns["mass"])[0, 0]
    keys, values, places, lost, target, cosine = after_one_loss(cache, tokens)
    now_keys, now_values = (np.array(a)[0, 0] for a in held_rows(cache))
    share = 1.0 if mode == "mean" else max(cosine, 0.0)
    for slot, place in enumerate(places):
        assert (now_keys[slot] == keys[place]).all()
        if place != target:
            assert (now_values[slot] == values[place]).all()
            continue
        wanted = (values[place] + share * values[lost]) / (1 + share)
        assert now_values[slot] == pytest.approx(wanted, abs=1e-5)
    slot = places.index(target)
    assert cache.columns["mass"][0, 0, slot].item() == pytest.approx(mass[target] + mass[lost])


def test_the_papers_form_keeps_the_sum_of_the_values() -> None:
    tokens = random_tokens(BUDGET, seed=2, heads=2)
    cache = full(tokens, config("sequential", cam_merge_gate=False))
    before = held_rows(cache)[1].sum(axis=2)
    cache._shrink(BUDGET - 3)
    after = held_rows(cache)[1].sum(axis=2)
    assert mx.abs(after - before).max().item() < 1e-4


@pytest.mark.parametrize("mode", ["mean", "sim_weighted"])
@pytest.mark.parametrize("length", [60, 400])
def test_values_stay_between_those_that_were_fed(mode: str, length: int) -> None:
    tokens = random_tokens(length + 5, seed=3)
    cache = new_cache(config(mode), shape_of(tokens))
    feed(cache, tokens.cut(0, length))
    feed(cache, tokens.cut(length, length + 5), 1)
    keys, values = held_rows(cache)
    assert (values.max(axis=2) <= tokens.values.max(axis=2) + 1e-5).all().item()
    assert (values.min(axis=2) >= tokens.values.min(axis=2) - 1e-5).all().item()
    places = cache.kept_positions()
    assert same(keys, mx.take_along_axis(tokens.keys, places[..., None], axis=2))


@pytest.mark.parametrize("form", ["affine4", "turboquant4"])
@pytest.mark.parametrize(("mode", "keys_too"), [("mean", True), ("sequential", False)])
def test_packed_survivors_are_coded_anew_only_when_they_take_over(
    form: str, mode: str, keys_too: bool
) -> None:
    tokens = random_tokens(BUDGET, seed=1, heads=1, repeat=1)
    setting = config(mode, cam_merge_gate=False, cam_merge_keys=keys_too)
    context = LayerContext(rope=nn.RoPE(64))
    cache = full(tokens, setting.with_fields(eviction_storage=form), context)
    cache.commit()
    before = copy.deepcopy(cache)
    _, values, places, lost, target, _ = after_one_loss(cache, tokens)
    takers = {target}
    if mode == "sequential":
        later = [place for place in places if place > lost]
        takers = set(later[:SEQUENTIAL_TARGETS])
    for side, moved in enumerate((takers if keys_too else set(), takers)):
        old, new = (c.layout()[side].compact()[3] for c in (before, cache))
        for name, words in new.items():
            stayed = mx.take(old[name], mx.array(places), axis=2)
            same_words = (stayed == words).all(axis=-1)[0, 0].tolist()
            assert {p for p, one in zip(places, same_words, strict=True) if not one} <= moved
        assert any(not one for one in same_words) or not moved
    share = values[lost] / len(takers)
    for place in takers:
        wanted = values[place] + share if mode == "sequential" else (values[place] + share) / 2
        coded = cache.as_held(mx.array(wanted)[None, None, None], 1).decode(0, 1, mx.float32)
        got = held_rows(cache)[1][:, :, places.index(place)]
        assert mx.abs(got - coded[:, :, 0]).max().item() < 1e-4


def test_sinks_take_nothing() -> None:
    tokens = random_tokens(200, seed=4)
    cache = new_cache(config("mean", cam_merge_gate=False), shape_of(tokens))
    feed(cache, tokens.cut(0, 199))
    attend(cache, tokens.cut(199, 200))
    cache.commit()
    assert same(held_rows(cache)[1][:, :, :2], tokens.values[:, :, :2])


def test_merging_a_twin_disturbs_less_than_dropping_it() -> None:
    tokens = random_tokens(BUDGET, seed=5, heads=1, repeat=1)
    keys, values = mx.array(tokens.keys), mx.array(tokens.values)
    cache = full(tokens, config(cam_merge_gate=False))
    _, _, _, lost, target, _ = after_one_loss(cache, tokens)
    keys[:, :, target], values[:, :, target] = keys[:, :, lost], 1.5 * values[:, :, lost]
    twins = Tokens(tokens.queries, keys, values)
    cache = full(twins, config(cam_merge_gate=False))
    cache._shrink(BUDGET - 1)
    places = cache.kept_positions()
    if lost in places.tolist()[0][0] and target in places.tolist()[0][0]:
        pytest.skip("another row went")
    query = keys[:, :, lost : lost + 1]

    def out(k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(query, k, v, scale=0.125)

    merged = held_rows(cache)
    plain = [mx.take_along_axis(a, places[..., None], axis=2) for a in (keys, values)]
    true = out(keys, values)
    assert mx.abs(out(*merged) - true).max().item() < mx.abs(out(*plain) - true).max().item()


def test_gates_open_as_often_as_they_should() -> None:
    tokens = random_tokens(1)
    cache = new_cache(config(), shape_of(tokens))
    losers = Losers(mx.zeros((1, 1, 10_000), dtype=mx.int32), 0)
    gate = cache._gate(losers, mx.full((1, 1, 10_000), 0.3))
    assert gate.mean().item() == pytest.approx(0.3, abs=0.02)
    assert same(gate, cache._gate(losers, mx.full((1, 1, 10_000), 0.3)))
    other = build_layer(config(), shape_of(tokens), LayerContext(layer=1))
    assert not same(gate, other._gate(losers, mx.full((1, 1, 10_000), 0.3)))


def test_probabilities_are_probabilities() -> None:
    lost, target = mx.array([1.0, 3.0, 1.0, 0.0]), mx.array([2.0, 1.0, 0.0, 0.0])
    assert gate_probability(lost, target).tolist() == [0.5, 1.0, 1.0, 1.0]


def test_merged_keys_are_turned_to_their_target() -> None:
    """Raw keys that are equal stay so: merging them changes nothing but rounding."""
    rope = nn.RoPE(64)
    tokens = random_tokens(BUDGET, seed=6, heads=1, repeat=1)
    raw = mx.broadcast_to(tokens.keys[:, :, :1], tokens.keys.shape)
    turned = tokens._replace(keys=rope(raw))
    cache = full(
        turned, config("mean", cam_merge_keys=True, cam_merge_gate=False), LayerContext(rope=rope)
    )
    cache._shrink(BUDGET - 4)
    places = cache.kept_positions()
    wanted = mx.take_along_axis(turned.keys, places[..., None], axis=2)
    assert mx.abs(held_rows(cache)[0] - wanted).max().item() < 1e-4


def test_merging_keys_needs_to_know_their_rotation() -> None:
    with pytest.raises(QuantizerConfigError, match="cam_merge_keys=True"):
        new_cache(config(cam_merge_keys=True), shape_of(random_tokens(1)))
    with pytest.raises(QuantizerConfigError, match="sequential"):
        new_cache(config("sequential", cam_merge_keys=True), shape_of(random_tokens(1)))
