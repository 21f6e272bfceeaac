"""Every ready method on every kind of model that mlx-lm has, against the model's own caches."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import EVICTING, READY, small_config

from tests.architectures import TABLE, feed, prompt, tiny, uncompiled
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import ModelPlan, probe
from veloxquant.cache.table import row_of
from veloxquant.cache.view import AttentionCall
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError

# c compressed, w sliding window, k chunks, r recurrent state, l latent; by cache entry
ENTRIES = {
    "llama": "cc", "llama_sliding": "wwc", "llama_80": "cc", "mistral": "cc", "qwen2": "cc",
    "qwen3": "cc", "phi": "cc", "phi3": "cc", "gemma2": "cc", "gemma3": "wwc", "gemma3n": "wcwc",
    "gemma4": "wcwc", "gpt_oss": "wc", "llama4": "kkkc", "deepseek_v2": "cc", "deepseek_v3": "ll",
    "deepseek_v32": "llll", "qwen3_next": "rrrc", "lfm2": "rc", "falcon_h1": "rcrc", "mamba2": "rr",
}  # fmt: skip
LETTER = {"full": "c", "sliding": "w", "within": "k", "recurrent": "r", "latent": "l"}
ARRAYS = {"gemma2"}
UNBATCHED = {"llama4"}
# Eight bits a value are lost in the noise of these models, but for one with keys of large norm.
CLOSE = 0.05


@pytest.fixture(autouse=True)
def plain_graphs() -> Iterator[None]:
    with uncompiled():
        yield


def letters(plan: ModelPlan) -> str:
    return "".join(
        next(letter for word, letter in LETTER.items() if word in layer.reason.split())
        for layer in plan.layers
    )


def stock(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def run(model: Any, caches: list[Any]) -> list[mx.array]:
    """Logits of a prompt in two chunks and of four single tokens."""
    tokens = prompt(84)
    outs = [feed(model, tokens[:50], caches), feed(model, tokens[50:80], caches)]
    return outs + [feed(model, [token], caches) for token in tokens[80:]]


def apart(a: list[mx.array], b: list[mx.array]) -> float:
    """Largest difference, of the largest logit."""
    off = max(float(mx.abs(x - y).max().item()) for x, y in zip(a, b, strict=True))
    return off / max(float(mx.abs(x).max().item()) for x in b)


def test_the_table_and_the_expectations_cover_each_other() -> None:
    assert ENTRIES.keys() == TABLE.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_the_probe_finds_what_can_be_compressed(name: str) -> None:
    plan = probe(tiny(name))
    assert letters(plan) == ENTRIES[name]
    assert plan.compressed == ENTRIES[name].count("c")
    assert plan.returns == ("arrays" if name in ARRAYS else "views")
    assert [w for w in plan.warnings if "unpacked for each call" in w] == plan.warnings
    assert bool(plan.warnings) == (name in ARRAYS)
    assert plan.batchable == (name not in UNBATCHED)
    if name in UNBATCHED:
        assert "ChunkedKVCache" in plan.no_batch


@pytest.mark.parametrize("name", ENTRIES)
def test_every_method_serves_the_model_or_says_why_not(name: str) -> None:
    model = tiny(name)
    want = run(model, stock(model))
    for row in READY:
        config = small_config(row)
        if name in ARRAYS and row in EVICTING:
            with pytest.raises(QuantizerConfigError, match="choose a method that keeps every"):
                plan_model(model, config)
            continue
        plan = plan_model(model, config)
        caches = new_caches(plan, config)
        for mine, theirs in zip(caches, stock(model), strict=True):
            if not plan.compressed:
                assert type(mine) is type(theirs)
        got = run(model, caches)
        for out in got:
            assert mx.isfinite(out).all().item(), row.name
        if row.name == "fp16" or not plan.compressed:
            assert apart(got, want) <= 1e-6, row.name
        if not plan.compressed:
            assert any("its own caches are used" in w for w in plan.warnings)
        else:
            # Fresh tokens are attended exactly, by whatever method.
            assert apart(got[:1], want[:1]) < 1e-4, row.name


@pytest.mark.parametrize("name", ENTRIES)
def test_eight_bits_stay_close_to_the_models_own_caches(name: str) -> None:
    model = tiny(name)
    config = KVCacheConfig(method="kivi", bit_width_inlier=8, residual_length=32)
    got = run(model, new_caches(plan_model(model, config), config))
    assert apart(got, run(model, stock(model))) < CLOSE


def test_sinks_of_gpt_oss_are_in_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt_oss")
    want = run(model, stock(model))
    config = KVCacheConfig(method="kivi", bit_width_inlier=8, residual_length=32)
    plan = plan_model(model, config)
    close = apart(run(model, new_caches(plan, config)), want)

    caches = new_caches(plan, config)
    attend = caches[1].attend

    def without_sinks(call: AttentionCall) -> mx.array:
        assert call.sinks is not None
        return attend(call._replace(sinks=None))

    monkeypatch.setattr(caches[1], "attend", without_sinks)
    assert apart(run(model, caches), want) > 10 * close


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_attend_again_but_feed_the_scorer_once(
    name: str, batched: bool
) -> None:
    model = tiny(name)
    config = small_config(row_of("snapkv"))
    caches = new_caches(plan_model(model, config), config)
    shared = caches[3]  # the last full layer of its own; the model's last layer shares it
    attended, observed = [], []
    attend, observe = shared.attend, shared.observe

    def counted_attend(call: AttentionCall) -> mx.array:
        attended.append(call.owner)
        return attend(call)

    def counted_observe(*args: Any) -> None:
        observed.append(args)
        observe(*args)

    shared.attend, shared.observe = counted_attend, counted_observe
    if batched:
        others = new_caches(plan_model(model, config), config)
        pairs = zip(caches, others, strict=True)
        caches = [same[0].merge(list(same)) for same in pairs]
    tokens = mx.array([prompt(20)] * (2 if batched else 1))
    mx.eval(model(tokens, cache=caches))
    assert len(attended) == 2
    assert sum(attended) == 1
    assert len(observed) == 1
