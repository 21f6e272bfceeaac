"""The attention hook: views go to their cache, everything else to the original function."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from veloxquant.cache import hook
from veloxquant.cache.view import AttentionCall, CacheView

NAME = "scaled_dot_product_attention"


class Spy:
    """A cache that notes who attends."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def attend(self, call: AttentionCall) -> Any:
        self.calls.append(
            {name: getattr(call, name) for name in ("scale", "mask", "sinks", "owner")}
        )
        return call.queries

    def views(self, *, own: bool = True) -> tuple[CacheView, CacheView]:
        shape = (1, 1, 3, 8)
        return (
            CacheView(self, shape, mx.float32, is_key=True, own=own),
            CacheView(self, shape, mx.float32, is_key=False, own=own),
        )


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    for key, value in names.items():
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Host:
    """A package with a base module and one model that imported the function by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.monkeypatch = monkeypatch

        def original(queries: Any, keys: Any, values: Any, cache: Any, **rest: Any) -> str:
            self.given.append((queries, keys, values, cache, rest))
            return "original"

        self.original = original
        self.base = module(monkeypatch, "toyhost.models.base", **{NAME: original})
        self.model = self.load("early")
        self.foreign = module(monkeypatch, "toyhost.other", **{NAME: original})

    def load(self, name: str) -> ModuleType:
        """`from .base import scaled_dot_product_attention` in a model file."""
        now = getattr(self.base, NAME)
        return module(self.monkeypatch, f"toyhost.models.{name}", **{NAME: now})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The hook over a host package of our own; mlx-lm's is left as it is."""
    one = hook.Host("toyhost.models.base", "toyhost.models.", NAME)
    monkeypatch.setattr(hook, "HOSTS", (one,))
    monkeypatch.setattr(hook, "_installed", {})
    yield Host(monkeypatch)
    hook.detach()


def test_attach_replaces_the_name_everywhere_and_once(host: Host) -> None:
    assert not hook.is_attached()
    assert hook.attach() == 2
    assert hook.is_attached()
    wrapper = getattr(host.base, NAME)
    assert wrapper is not host.original
    assert getattr(host.model, NAME) is wrapper
    assert getattr(host.foreign, NAME) is host.original
    assert hook.attach() == 0
    assert getattr(host.base, NAME) is wrapper


def test_a_model_loaded_later_has_the_wrapper(host: Host) -> None:
    hook.attach()
    late = host.load("late")
    assert getattr(late, NAME) is getattr(host.base, NAME)
    assert hook.attach() == 0
    assert hook.detach() == 3
    assert getattr(late, NAME) is host.original


def test_detach_restores_and_can_be_repeated(host: Host) -> None:
    hook.attach()
    assert hook.detach() == 2
    assert getattr(host.base, NAME) is host.original
    assert getattr(host.model, NAME) is host.original
    assert hook.detach() == 0
    assert not hook.is_attached()
    assert hook.attach() == 2


def test_a_name_that_someone_else_replaced_is_left_alone(host: Host) -> None:
    hook.attach()
    other = object()
    setattr(host.model, NAME, other)
    hook.attach()
    hook.detach()
    assert getattr(host.model, NAME) is other
    assert getattr(host.base, NAME) is host.original


def test_arrays_go_to_the_original_untouched(host: Host) -> None:
    hook.attach()
    attention = getattr(host.model, NAME)
    q, k, v, cache = (object() for _ in range(4))
    assert attention(q, k, v, cache=cache, scale=0.5, mask="causal") == "original"
    assert host.given == [(q, k, v, cache, {"scale": 0.5, "mask": "causal"})]
    sinks = object()
    attention(q, k, v, cache, scale=1.0, mask=None, sinks=sinks)
    assert host.given[1][4] == {"scale": 1.0, "mask": None, "sinks": sinks}


def test_tuples_of_stock_quantized_caches_go_to_the_original(host: Host) -> None:
    hook.attach()
    triple = (object(), object(), object())
    assert getattr(host.model, NAME)(object(), triple, triple, cache=None, scale=1.0) == "original"
    assert host.given[0][1] is triple


def test_views_go_to_their_cache_without_being_given_it(host: Host) -> None:
    """Layers that share keys pass another layer's views and no cache."""
    hook.attach()
    attention, spy, sinks = getattr(host.model, NAME), Spy(), object()
    keys, values = spy.views()
    q = object()
    assert attention(q, keys, values, cache=None, scale=0.25, mask="causal", sinks=sinks) is q
    assert attention(q, keys, values, None, scale=0.25, mask=None) is q
    assert not host.given
    assert spy.calls == [
        {"scale": 0.25, "mask": "causal", "sinks": sinks, "owner": True},
        {"scale": 0.25, "mask": None, "sinks": None, "owner": False},
    ]


def test_views_of_a_layer_that_only_shares_never_own(host: Host) -> None:
    spy = Spy()
    keys, values = spy.views(own=False)
    keys.attend(object(), values, 1.0, None)  # type: ignore[arg-type]
    assert not spy.calls[0]["owner"]


@pytest.mark.parametrize("wrong", ["array", "other cache", "swapped"])
def test_values_that_do_not_belong_to_the_keys_are_refused(host: Host, wrong: str) -> None:
    hook.attach()
    spy = Spy()
    keys, _ = spy.views()
    values = {"array": mx.zeros((1, 1, 3, 8)), "other cache": Spy().views()[1], "swapped": keys}
    with pytest.raises(TypeError, match="view of the same cache"):
        getattr(host.model, NAME)(object(), keys, values[wrong], cache=None, scale=1.0)


@pytest.fixture
def restored() -> Iterator[None]:
    """Leave mlx-lm hooked or not, as it was found."""
    before = hook.is_attached()
    yield
    (hook.attach if before else hook.detach)()


def test_mlx_lm_is_hooked_before_and_after_a_model_file_is_loaded(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import base, llama

    hook.detach()
    original = getattr(base, NAME)
    assert getattr(llama, NAME) is original
    assert hook.attach() >= 2
    assert getattr(llama, NAME) is getattr(base, NAME) is not original
    monkeypatch.delitem(sys.modules, "mlx_lm.models.stablelm", raising=False)
    late = importlib.import_module("mlx_lm.models.stablelm")
    assert getattr(late, NAME) is getattr(base, NAME)
    q = mx.random.normal((1, 2, 3, 8))
    ours = getattr(llama, NAME)(q, q, q, cache=None, scale=1.0, mask="causal")
    assert mx.array_equal(ours, original(q, q, q, cache=None, scale=1.0, mask="causal")).item()
    hook.detach()
    assert getattr(late, NAME) is getattr(llama, NAME) is original


def test_nothing_happens_while_no_host_is_loaded(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "toyhost.models.base")
    assert hook.attach() == 0
    assert not hook.is_attached()
