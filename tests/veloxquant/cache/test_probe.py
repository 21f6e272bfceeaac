"""What a probe does with models of every temper; whole architectures are in test_architectures."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import small_config
from mlx.utils import tree_flatten
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from tests.architectures import tiny
from veloxquant.cache import hook
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import ModelPlan, probe
from veloxquant.cache.table import row_of
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError

HEADS, DIM, VOCAB = 2, 32, 64


class Toy:
    """One layer of attention between an embedding and its transpose."""

    def __init__(self, **mask: Any) -> None:
        keys = mx.random.split(mx.random.key(0), 4)
        width = HEADS * DIM
        self.table = mx.random.normal((VOCAB, width), key=keys[0])
        self.maps = [mx.random.normal((width, width), key=k) / width**0.5 for k in keys[1:]]
        self.mask = mask
        self.layers = [self]

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.table[tokens]
        batch, length, width = x.shape
        q, k, v = (
            (x @ m).reshape(batch, length, HEADS, DIM).transpose(0, 2, 1, 3) for m in self.maps
        )
        mask = base.create_attention_mask(x, cache[0], **self.mask)
        out = self.attention(q, k, v, cache[0], mask)
        return out.transpose(0, 2, 1, 3).reshape(batch, length, width) @ self.table.T

    def attention(self, q: Any, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        keys, values = cache.update_and_fetch(k, v)
        return base.scaled_dot_product_attention(
            q, keys, values, cache=cache, scale=DIM**-0.5, mask=mask
        )


class Deaf(Toy):
    """Feeds its cache and then attends to the fresh rows alone."""

    def attention(self, q: Any, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        cache.update_and_fetch(k, v)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=DIM**-0.5)


class ByHand(Toy):
    """Writes attention out; `axes` of the scores are four or five."""

    axes = 4

    def attention(self, q: Any, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        keys, values = cache.update_and_fetch(k, v)
        if self.axes == 5:
            q, keys, values = (mx.expand_dims(a, 2) for a in (q, keys, values))
        scores = q @ keys.swapaxes(-1, -2) * DIM**-0.5
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        out = mx.softmax(scores, axis=-1) @ values
        return out[:, :, 0] if self.axes == 5 else out


class ByHandInFive(ByHand):
    axes = 5


class Unmasked(ByHand):
    """Takes no mask, so that padding would be attended to."""

    def attention(self, q: Any, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        return super().attention(q, k, v, cache, None)


class Intruder(Toy):
    """Reaches into its cache."""

    def attention(self, q: Any, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        out = super().attention(q, k, v, cache, mask)
        cache.keys = mx.contiguous(cache.keys)
        return out + 0 * cache.keys.sum()


class Broken(Toy):
    def attention(self, q: Any, k: Any, v: Any, cache: Any, mask: Any) -> mx.array:
        raise ValueError("no attention today")


class NoCaches(Toy):
    def make_cache(self) -> list[Any]:
        raise KeyError("layer_types")


def run(model: Any, caches: list[Any], *tokens: list[int]) -> mx.array:
    outs = [model(mx.array([part]), cache=caches) for part in tokens]
    return mx.concatenate(outs, axis=1)


def kinds(plan: ModelPlan) -> list[tuple[str, str]]:
    return [(layer.kind, layer.reason) for layer in plan.layers]


def test_a_model_that_uses_the_shared_function_gets_views() -> None:
    plan = probe(Toy())
    assert (plan.returns, plan.warnings, plan.no_batch) == ("views", [], "")
    assert kinds(plan) == [("compressed", "full attention")]
    assert plan.layers[0].shape == (HEADS, HEADS, DIM, DIM, 4)
    assert plan.shapes() == [plan.layers[0].shape]
    assert hook.is_attached()


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = tiny("qwen3_next")
    before = dict(tree_flatten(model.parameters()))
    names, make = set(vars(model)), type(model).make_cache
    probe(model)
    after = dict(tree_flatten(model.parameters()))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert set(vars(model)) == names
    assert type(model).make_cache is make
    assert "make_cache" not in vars(model)


def test_a_model_that_ignores_views_gets_arrays_and_the_plan_says_so() -> None:
    plan = probe(Deaf())
    assert plan.returns == "arrays"
    assert "does not reach the hook" in plan.warnings[0]
    assert "unpacked for each call" in plan.warnings[0]


def test_a_model_that_reaches_into_its_caches_keeps_them() -> None:
    model = Intruder()
    plan = plan_model(model, small_config(row_of("kivi")))
    assert kinds(plan) == [("native", "the model works inside its KVCache")]
    assert "its own caches are used" in plan.warnings[0]
    caches = new_caches(plan, small_config(row_of("kivi")))
    assert type(caches[0]) is KVCache
    run(model, caches, [1, 2, 3], [4])


@pytest.mark.parametrize("kind", [ByHand, ByHandInFive])
@pytest.mark.parametrize("method", ["fp16", "kivi", "turboquant_rvq"])
def test_attention_by_hand_batches_with_the_mask_it_takes(kind: type[ByHand], method: str) -> None:
    model, config = kind(return_array=True), small_config(row_of(method))
    plan = plan_model(model, config)
    assert (plan.returns, plan.array_masks, plan.no_batch) == ("arrays", True, "")
    assert plan.mask_axes == kind.axes
    prompts = [[i % 60 + 1 for i in range(70)], [5, 9, 2] * 13]
    alone = [new_caches(plan, config) for _ in prompts]
    wanted = [
        run(model, caches, p, [7], [8])[:, -2:] for caches, p in zip(alone, prompts, strict=True)
    ]

    rows = [new_caches(plan, config) for _ in prompts]
    batch = [rows[0][0].merge([caches[0] for caches in rows])]
    width = max(len(p) for p in prompts)
    lengths = [len(p) for p in prompts]
    padding = [width - n for n in lengths]
    batch[0].prepare(lengths=lengths, right_padding=padding)
    model(mx.array([p + [0] * n for p, n in zip(prompts, padding, strict=True)]), cache=batch)
    batch[0].finalize()
    batch = [batch[0].merge([batch[0].extract(i) for i in range(2)])]  # what was taken out, too
    outs = [model(mx.array([[token]] * 2), cache=batch) for token in (7, 8)]
    got = mx.concatenate(outs, axis=1)
    for i, want in enumerate(wanted):
        assert mx.allclose(got[i : i + 1], want, rtol=1e-4, atol=1e-4).item()


def test_a_model_that_would_attend_to_padding_is_not_batched() -> None:
    plan = probe(Unmasked(return_array=True))
    assert not plan.batchable
    assert "unequal length" in plan.no_batch


@pytest.mark.parametrize("method", ["snapkv", "streaming_llm"])
@pytest.mark.parametrize(
    ("mask", "why"), [({"return_array": True}, "mask array"), ({"window_size": 8}, "8 tokens")]
)
def test_a_method_that_gives_up_tokens_refuses_masks_by_position(
    method: str, mask: dict[str, Any], why: str
) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{method}.*{why}.*keeps every token"):
        plan_model(Toy(**mask), small_config(row_of(method)))


@pytest.mark.parametrize("mask", [{"return_array": True}, {"window_size": 8}])
@pytest.mark.parametrize("method", ["fp16", "kivi", "turboquant_rvq"])
def test_masks_by_position_hold_alone_and_in_a_batch(method: str, mask: dict[str, Any]) -> None:
    model, config = Toy(**mask), small_config(row_of(method))
    plan = plan_model(model, config)
    assert plan.returns == "views"
    prompts = [[i % 60 + 1 for i in range(40)], [5, 9, 2, 4]]
    alone = [new_caches(plan, config) for _ in prompts]
    pieces = [[p[i : i + 16] for i in range(0, len(p), 16)] for p in prompts]
    wanted = [run(model, c, *p, [7], [8])[:, -2:] for c, p in zip(alone, pieces, strict=True)]
    if method == "fp16":
        plain = run(model, [KVCache()], *pieces[0], [7], [8])[:, -2:]
        assert mx.array_equal(wanted[0], plain).item()

    rows = [new_caches(plan, config) for _ in prompts]
    batch = [rows[0][0].merge([caches[0] for caches in rows])]
    batch[0].prepare(lengths=[40, 4], right_padding=[0, 36])
    padded = mx.array([prompts[0], prompts[1] + [0] * 36])
    for start in (0, 16, 32):
        mx.eval(model(padded[:, start : start + 16], cache=batch))
    batch[0].finalize()
    outs = [model(mx.array([[token]] * 2), cache=batch) for token in (7, 8)]
    got = mx.concatenate(outs, axis=1)
    for i, want in enumerate(wanted):
        assert mx.allclose(got[i : i + 1], want, rtol=1e-4, atol=1e-4).item()


def test_a_mask_for_other_tokens_than_are_held_is_refused() -> None:
    config = small_config(row_of("kivi"))
    plan = plan_model(Toy(), config)
    rows = [new_caches(plan, config)[0] for _ in range(2)]
    batch = rows[0].merge(rows)
    x = mx.zeros((2, HEADS, 3, DIM))
    keys, values = batch.update_and_fetch(x, x)
    with pytest.raises(CacheStateError, match="covers 5 tokens, the batch holds 3"):
        keys.attend(x, values, 1.0, mx.ones((2, 1, 3, 5), dtype=mx.bool_))


def test_a_model_that_cannot_run_is_named() -> None:
    with pytest.raises(QuantizerConfigError, match="no attention today"):
        probe(Broken())


def test_a_model_that_cannot_make_its_caches_is_named() -> None:
    with pytest.raises(QuantizerConfigError, match=r"cannot make its own caches.*layer_types"):
        probe(NoCaches())


def test_entries_of_other_kinds_stay_and_lists_are_walked_into() -> None:
    class Nested(Toy):
        def make_cache(self) -> list[Any]:
            return [CacheList(RotatingKVCache(max_size=16), KVCache()), KVCache()]

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            return super().__call__(tokens, [cache[0][1]])

    config = small_config(row_of("kivi"))
    plan = plan_model(Nested(), config)
    assert [layer.path for layer in plan.layers] == [(0, 0), (0, 1), (1,)]
    assert [layer.kind for layer in plan.layers] == ["native", "compressed", "native"]
    assert plan.layers[2].reason == "unused by the model"
    caches = new_caches(plan, config)
    assert isinstance(caches[0], CacheList)
    assert [type(c).__name__ for c in (*caches[0].caches, caches[1])] == [
        "RotatingKVCache",
        "KIVIKVCache",
        "KVCache",
    ]
