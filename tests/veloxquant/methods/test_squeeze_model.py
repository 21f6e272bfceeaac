"""squeeze on a model: budgets from cosines of its residual stream, for every sequence anew."""

import functools
from typing import Any

import mlx.core as mx
import pytest

from tests.architectures import DENSE, feed, prompt
from veloxquant.allocators.layer_budgets import class_budgets
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.probe import ModelPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SqueezeAttentionOptions

LAYERS, MEAN, SINKS = 6, 40, 4
CONFIG = KVCacheConfig(method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=MEAN))
# Factors of what attention adds to the stream; the least change it least.
FACTORS = (3.0, 0.01, 1.0, 0.02, 4.0, 1.5)


@functools.cache
def layered() -> tuple[Any, ModelPlan]:
    """A model whose attention changes the stream more in some layers than in others."""
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(
        ModelArgs.from_dict({**DENSE, "model_type": "llama", "num_hidden_layers": LAYERS})
    )
    key = mx.random.key(3)
    for layer, factor in zip(model.model.layers, FACTORS, strict=True):
        key, sub = mx.random.split(key)
        weight = layer.self_attn.o_proj.weight
        layer.self_attn.o_proj.weight = factor * mx.random.normal(weight.shape, key=sub) / 16
    model.eval()
    mx.eval(model.parameters())
    return model, plan_model(model, CONFIG)


def read(tokens: list[int], cuts: tuple[int, ...], caches: list[Any] | None = None) -> list[Any]:
    model, plan = layered()
    caches = caches or new_caches(plan, CONFIG)
    for start, stop in zip((0, *cuts), cuts, strict=False):
        feed(model, tokens[start:stop], caches)
    for cache in caches:
        cache.commit()
    return caches


def said(caches: list[Any]) -> list[float]:
    return [c.concentration for c in caches]


@pytest.mark.parametrize("cuts", [(99, 100), (20, 41, 60, 83, 99, 100)])
def test_layers_that_change_the_stream_least_give_rows_to_the_others(cuts: Any) -> None:
    caches = read(prompt(100), cuts)
    assert {c.fidelity for c in caches} == {"exact"}
    values = said(caches)
    assert sorted(sorted(range(LAYERS), key=values.__getitem__)[-2:]) == [1, 3]
    budgets = [c.layer_budget for c in caches]
    assert budgets == class_budgets(values, MEAN, SINKS + 8)
    assert budgets == [c.size() for c in caches]
    assert sum(budgets) == LAYERS * MEAN
    assert budgets[1] == budgets[3] == 12
    assert values == pytest.approx(said(read(prompt(100), (99, 100))), abs=1e-5)


def test_every_sequence_resolves_by_its_own_stream() -> None:
    read(prompt(70, 4), (69, 70))
    first = read(prompt(100, 1), (99, 100))
    second = read(prompt(100, 2), (50, 99, 100))
    alone = read(prompt(100, 2), (99, 100))
    assert said(second) == pytest.approx(said(alone), abs=1e-5)
    assert said(second) != pytest.approx(said(first), abs=1e-4)


def test_prompts_of_a_batch_resolve_each_for_itself() -> None:
    model, plan = layered()
    prompts = [prompt(100, 1), prompt(73, 2)]
    alone = [read(tokens, (len(tokens) - 1, len(tokens))) for tokens in prompts]
    rows = [new_caches(plan, CONFIG) for _ in prompts]
    batch = [same[0].merge(list(same)) for same in zip(*rows, strict=True)]
    lengths = [len(tokens) - 1 for tokens in prompts]
    for cache in batch:
        cache.prepare(lengths=lengths, right_padding=[99 - n for n in lengths])
    padded = mx.array([t[:-1] + [0] * (100 - len(t)) for t in prompts])
    mx.eval(model(padded, cache=batch))
    for cache in batch:
        cache.finalize()
    mx.eval(model(mx.array([[t[-1]] for t in prompts]), cache=batch))
    for own, single in zip(rows, alone, strict=True):
        for cache in own:
            cache.commit()
        assert said(own) == pytest.approx(said(single), abs=1e-5)
        assert [c.layer_budget for c in own] == [c.layer_budget for c in single]
        assert {c.fidelity for c in own} == {"exact"}


def test_a_prompt_that_was_saved_half_read_goes_on_with_its_cosines(tmp_path: Any) -> None:
    model, plan = layered()
    tokens, want = prompt(100), said(read(prompt(100), (99, 100)))
    caches = new_caches(plan, CONFIG)
    feed(model, tokens[:60], caches)
    save_caches(tmp_path / "half", caches, CONFIG)
    loaded = load_caches(tmp_path / "half", plan, CONFIG)
    read(tokens[60:], (39, 40), loaded)
    assert said(loaded) == pytest.approx(want, abs=1e-5)
    assert {c.fidelity for c in loaded} == {"exact"}
    save_caches(tmp_path / "all", loaded, CONFIG)
    again = load_caches(tmp_path / "all", plan, CONFIG)
    assert {c.fidelity for c in again} == {"exact"}


def test_one_token_that_passed_unseen_makes_it_the_proxy() -> None:
    model, plan = layered()
    tokens = prompt(100)
    caches = new_caches(plan, CONFIG)
    feed(model, tokens[:60], caches)
    caches[2].cosine.tokens -= 1
    read(tokens[60:], (39, 40), caches)
    assert {c.fidelity for c in caches} == {"proxy"}
    assert sum(c.layer_budget for c in caches) == LAYERS * MEAN


def test_tokens_taken_back_leave_the_mean() -> None:
    model, plan = layered()
    tokens = prompt(100)
    caches = new_caches(plan, CONFIG)
    feed(model, tokens[:60], caches)
    before = [c.cosine.mean(60).item() for c in caches]
    for cache in caches:
        assert cache.trim(10) == 10
    assert [c.cosine.mean(50).item() for c in caches] == pytest.approx(before)
    read(tokens[50:], (49, 50), caches)
    assert {c.fidelity for c in caches} == {"exact"}


def test_short_prompts_lose_nothing() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model, plan = layered()
    caches, stock = new_caches(plan, CONFIG), make_prompt_cache(model)
    for piece in (prompt(9), [5], [6], [7]):
        assert mx.array_equal(feed(model, piece, caches), feed(model, piece, stock))
    assert not any(c.is_resolved for c in caches)


@pytest.mark.parametrize(("value", "fidelity"), [(0.5, "exact"), (float("nan"), "proxy")])
def test_equal_cosines_give_equal_budgets_and_no_number_is_no_cosine(
    value: float, fidelity: str
) -> None:
    model, plan = layered()
    caches = new_caches(plan, CONFIG)
    for piece in (prompt(99), [5]):
        feed(model, piece, caches)
    for cache in caches:
        cache.board.notes[cache.place].cosine = mx.array(value)
    for cache in caches:
        cache.commit()
    assert {c.fidelity for c in caches} == {fidelity}
    budgets = [c.layer_budget for c in caches]
    assert sum(budgets) == LAYERS * MEAN
    assert (budgets == [MEAN] * LAYERS) == (fidelity == "exact")
