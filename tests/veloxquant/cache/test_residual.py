"""The residual stream around attention: found in every architecture, measured, left as it was."""

import copy
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import TABLE, feed, prompt, tiny, uncompiled
from veloxquant.cache import hook
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import probe
from veloxquant.cache.residual import cosines
from veloxquant.cache.residual_sites import all_show, find_sites
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SqueezeAttentionOptions

CONFIG = KVCacheConfig(method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=512))
# The stream of each token is several there, mixed before and after attention.
HIDDEN = {"gemma3n"}
NORM = {
    "gemma2": "pre_feedforward_layernorm", "gemma3": "pre_feedforward_layernorm",
    "gemma4": "pre_feedforward_layernorm", "lfm2": "ffn_norm",
}  # fmt: skip
SIDE_BY_SIDE = {"phi", "falcon_h1"}


def squeezed(model: Any) -> list[Any]:
    """Caches of a sequence, those of squeeze only."""
    caches = new_caches(plan_model(model, CONFIG), CONFIG)
    return [c for c in caches if getattr(c, "method", None) == "squeeze"], caches


def streams(model: Any, tokens: list[int]) -> list[tuple[mx.array, mx.array]]:
    """The stream before and after attention of every layer of a plain model, by its own parts."""
    body, out = model.model, []
    x = body.embed_tokens(mx.array([tokens]))
    for layer in body.layers:
        attention = layer.self_attn(layer.input_layernorm(x), "causal", None)
        out.append((x, x + attention))
        x = layer(x, "causal", None)
    return out


def reference(before: mx.array, after: mx.array) -> np.ndarray:
    x, y = (np.asarray(a.astype(mx.float32), dtype=np.float64) for a in (before, after))
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


@pytest.mark.parametrize("name", TABLE)
def test_every_architecture_shows_its_stream(name: str) -> None:
    with uncompiled():
        model = tiny(name)
        plan = probe(model)
        classes = [type(m) for m in model.modules()]
        sites = find_sites(plan)
    assert [type(m) for m in model.modules()] == classes
    assert all_show(plan) == (name not in HIDDEN)
    assert len(sites) == (0 if name in HIDDEN else plan.compressed)
    for path, site in sites.items():
        layer = model.layers[path[0]]
        assert site.layer is layer
        assert site.is_added == (name in SIDE_BY_SIDE)
        wanted = "self_attn" if site.is_added else NORM.get(name, "post_attention_layernorm")
        assert site.after is layer[wanted]


def test_cosines_of_large_small_and_empty_streams() -> None:
    x = mx.random.normal((2, 9, 48), key=mx.random.key(1))
    y = x + mx.random.normal((2, 9, 48), key=mx.random.key(2))
    want = reference(x, y)
    for factor in (1.0, 1e30, 1e-20):
        got = cosines(x * factor, y * factor)
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)
    half = cosines((1e4 * x).astype(mx.float16), (1e4 * y).astype(mx.float16))
    assert np.abs(np.asarray(half) - want).max() < 1e-3
    assert cosines(mx.zeros((1, 2, 8)), mx.zeros((1, 2, 8))).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_the_mean_cosine_is_that_of_the_streams_however_a_prompt_is_cut(name: str) -> None:
    model, tokens = tiny(name, dtype="float16"), prompt(60)
    model = model if name == "llama" else tiny(name)
    want = [reference(*pair).mean() for pair in streams(model, tokens)]
    for cuts in [(60,), (7, 20, 21, 44, 60)]:
        ours, caches = squeezed(model)
        for start, stop in zip((0, *cuts), cuts, strict=False):
            feed(model, tokens[start:stop], caches)
        got = [c.cosine.mean(60).item() for c in ours]
        np.testing.assert_allclose(got, want, atol=1e-3)
        assert [c.fidelity for c in ours] == ["exact"] * len(ours)


def test_norms_after_attention_are_part_of_the_change() -> None:
    with uncompiled():
        model, tokens = tiny("gemma3"), prompt(20)
        (cache,), caches = squeezed(model)
        seen: dict[str, mx.array] = {}
        layer = model.layers[2]
        layer_class, norm_class = type(layer), type(layer.pre_feedforward_layernorm)
        assert layer_class.__name__ == "TransformerBlock"

        def noting(cls: type, name: str) -> type:
            def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
                seen[name] = x
                return cls.__call__(self, x, *args, **kwargs)

            return type(cls.__name__, (cls,), {"__call__": call})

        layer.__class__ = noting(layer_class, "before")
        layer.pre_feedforward_layernorm.__class__ = noting(norm_class, "after")
        try:
            feed(model, tokens, caches)
        finally:
            layer.__class__ = layer_class
            layer.pre_feedforward_layernorm.__class__ = norm_class
    want = reference(seen["before"], seen["after"]).mean()
    assert cache.cosine.mean(20).item() == pytest.approx(want, abs=1e-5)


def test_rows_of_a_batch_have_cosines_of_their_own_without_padding() -> None:
    model = tiny("llama")
    prompts = [prompt(30, 1), prompt(11, 2), prompt(19, 3)]
    alone = []
    for tokens in prompts:
        ours, caches = squeezed(model)
        feed(model, tokens, caches)
        alone.append([c.cosine.mean(len(tokens)).item() for c in ours])
    rows = [squeezed(model)[0] for _ in prompts]
    batch = [same[0].merge(list(same)) for same in zip(*rows, strict=True)]
    lengths = [len(tokens) for tokens in prompts]
    for cache in batch:
        cache.prepare(lengths=lengths, right_padding=[30 - n for n in lengths])
    padded = mx.array([tokens + [0] * (30 - len(tokens)) for tokens in prompts])
    for start, stop in [(0, 13), (13, 30)]:
        mx.eval(model(padded[:, start:stop], cache=batch))
    for row, want, n in zip(rows, alone, lengths, strict=True):
        np.testing.assert_allclose([c.cosine.mean(n).item() for c in row], want, atol=1e-5)


def test_outputs_are_the_same_to_the_bit() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    for name in ("llama", "phi"):
        model, tokens = tiny(name), prompt(40)
        caches = make_prompt_cache(model)
        want = [feed(model, tokens[:30], caches), feed(model, tokens[30:], caches)]
        ours, caches = squeezed(model)
        got = [feed(model, tokens[:30], caches), feed(model, tokens[30:], caches)]
        assert ours[0].cosine.tokens == 40
        for a, b in zip(got, want, strict=True):
            assert mx.array_equal(a, b)


def kinds(model: Any) -> list[type]:
    return [type(m) for m in model.modules()]


def test_layers_are_watched_only_while_caches_wait() -> None:
    model = tiny("llama")
    before = kinds(model)
    plan = plan_model(model, CONFIG)
    assert kinds(model) == before
    first, second = new_caches(plan, CONFIG), new_caches(plan, CONFIG)
    assert sum(a is not b for a, b in zip(kinds(model), before, strict=True)) == 4
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), before, strict=True))
    assert [name for name, _ in model.named_modules()] == [n for n, _ in tiny_names(model)]
    feed(model, prompt(9), first)
    del first
    assert kinds(model) != before
    feed(model, prompt(9), second)
    twin = copy.deepcopy(second)
    del second
    assert kinds(model) != before
    feed(model, prompt(9), twin)
    assert twin[0].cosine.tokens == 18
    del twin
    assert kinds(model) == before
    given = SqueezeAttentionOptions(squeeze_budget=512, squeeze_resolved_budget=100)
    config = KVCacheConfig(method="squeeze", options=given)
    caches = new_caches(plan_model(model, config), config)
    assert kinds(model) == before
    assert caches[0].fidelity == "proxy"


def tiny_names(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in type(model).named_modules(model)]


def test_detaching_restores_the_model_and_waiting_caches_turn_to_the_proxy() -> None:
    model = tiny("llama")
    before = kinds(model)
    config = CONFIG.with_fields(squeeze_budget=16)
    caches = new_caches(plan_model(model, config), config)
    feed(model, prompt(30), caches)
    hook.detach()
    try:
        assert kinds(model) == before
    finally:
        hook.attach()
    for token in prompt(2, 5):
        feed(model, [token], caches)
    assert [c.fidelity for c in caches] == ["proxy"] * 2
    assert all(c.is_resolved and c.size() <= c.layer_budget + 1 for c in caches)


def test_nothing_of_a_prompt_stays_in_memory() -> None:
    model, tokens = tiny("llama"), prompt(400)
    caches = squeezed(model)[1]
    feed(model, tokens, caches)
    mx.eval([c.state for c in caches])
    del caches
    gc.collect()
    gc.disable()
    # MLX's cache of freed buffers hands out larger ones than asked for.
    limit = mx.set_cache_limit(0)
    try:
        caches = squeezed(model)[1]
        base = mx.get_active_memory()
        feed(model, tokens, caches)
        mx.eval([c.state for c in caches])
        held = sum(c.nbytes for c in caches)
        # One stream of one layer would be 200 KB.
        assert abs(mx.get_active_memory() - base - held) < 16384
        del caches
        assert mx.get_active_memory() - base < 16384
    finally:
        mx.set_cache_limit(limit)
        gc.enable()
