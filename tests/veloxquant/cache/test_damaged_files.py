"""Files whose arrays hold impossible values are refused; any bit pattern of codes can be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from cache_lab import (
    Tokens,
    attend,
    before_checksums,
    every_row,
    plan_of,
    random_tokens,
    shape_of,
    small_config,
)

from veloxquant.cache.builder import new_caches
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.probe import ModelPlan
from veloxquant.cache.table import MethodRow, row_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AdaKVOptions, CacheGenOptions, MiniCacheOptions
from veloxquant.core.exceptions import CacheStateError

MARKS = {"t", "n"}
"""Arrays of words that are no codes: they say which block and head others belong to."""
HARMLESS = {("minicache", "i")}
"""Places that no slot has are compared with, never used: 255 marks an empty one."""
LAYERS = 2
LATE = {"minicache": 200, "palu": 576, "xkv": 576}
"""Lengths at which methods have coded tokens; the others have by 330."""
TOPS = {
    mx.uint8: 255, mx.uint16: 65_535, mx.uint32: 4_294_967_295, mx.int32: 2_147_483_647,
}  # fmt: skip


class File:
    """A saved cache, and the same with the integer arrays of one name at their type's maximum."""

    def __init__(self, folder: Path, config: KVCacheConfig, tokens: int = 330) -> None:
        self.config, self.folder = config, folder
        # minicache merges the deeper half of the layers.
        count = 2 * LAYERS if config.method == "minicache" else LAYERS
        tokens = LATE.get(config.method, tokens)
        rows = [random_tokens(tokens, dtype=mx.float16, seed=i) for i in range(count)]
        self.plan: ModelPlan = plan_of(shape_of(rows[0]), count)
        self.caches = new_caches(self.plan, config)
        for cache, own in zip(self.caches, rows, strict=True):
            mx.eval(attend(cache, own))
        self.source = folder / "good.safetensors"
        save_caches(self.source, self.caches, config)
        loaded: Any = mx.load(str(self.source), return_metadata=True)
        self.arrays: dict[str, mx.array] = loaded[0]
        # With checksums nothing that was changed would be read.
        self.metadata = before_checksums(loaded[1])

    def integers(self) -> dict[str, mx.Dtype]:
        found = {
            k.rsplit(".", 1)[-1]: a.dtype
            for k, a in self.arrays.items()
            if a.dtype in TOPS and a.size
        }
        return dict(sorted(found.items()))

    def with_values(self, name: str, change: Any) -> Path:
        return self.changed(lambda k, a: k.rsplit(".", 1)[-1] == name and a.dtype in TOPS, change)

    def changed(self, which: Callable[[str, mx.array], bool], change: Any) -> Path:
        arrays = {k: change(a) if which(k, a) else a for k, a in self.arrays.items()}
        bad = self.folder / "bad.safetensors"
        mx.save_safetensors(str(bad), arrays, self.metadata)
        return bad

    def load(self, file: Path) -> list[Any]:
        return load_caches(file, self.plan, self.config)


def at_most(a: mx.array) -> mx.array:
    return mx.full(a.shape, TOPS[a.dtype], dtype=a.dtype)


def go_on(caches: list[Any]) -> None:
    """Attend with one token and with several, read every row, and rewind."""
    for length in (1, 40):
        tokens: Tokens = random_tokens(length, dtype=mx.float16, seed=length)
        mx.eval([attend(cache, tokens) for cache in caches])
    for cache in caches:
        if not hasattr(cache, "rows"):
            continue
        cache.returns = "arrays"
        mx.eval(cache.keys_and_values())
        if cache.is_trimmable():
            cache.trim(20)
        mx.eval(cache.keys_and_values())


def check(file: File) -> set[str]:
    """Names whose arrays must not hold any value."""
    refused = set()
    for name, dtype in file.integers().items():
        bad = file.with_values(name, at_most)
        if (file.config.method, name) in HARMLESS:
            go_on(file.load(bad))
            go_on(file.load(file.with_values(name, lambda a: mx.full(a.shape, 200, dtype=a.dtype))))
        elif name in MARKS or dtype != mx.uint32:
            with pytest.raises(CacheStateError, match=name):
                file.load(bad)
            refused.add(name)
        else:
            go_on(file.load(bad))
    return refused


@every_row
def test_places_outside_are_refused_and_any_code_is_read(row: MethodRow, tmp_path: Path) -> None:
    file = File(tmp_path, small_config(row, head_dim=64))
    unfitted = [
        store.codec.spec.name
        for cache in file.caches
        if hasattr(cache, "layout")
        for store in cache.layout()
        if store.codec.spec.fit_tokens and not store.fitted
    ]
    assert not unfitted, "the file must be long enough to hold fitted constants"
    assert {name for method, name in HARMLESS if method == row.name} <= set(file.integers())
    check(file)
    for value in (mx.nan, 6e4):
        broken = file.changed(
            lambda _, a: mx.issubdtype(a.dtype, mx.floating),
            lambda a, value=value: mx.full(a.shape, value, dtype=a.dtype),
        )
        go_on(file.load(broken))


class Case(NamedTuple):
    method: str
    options: Any
    places: set[str]


@pytest.mark.parametrize(
    "case",
    [
        Case("kvquant", None, {"i"}),
        Case("gear", None, {"si"}),
        Case("kitty", None, {"c"}),
        Case("kvtc", None, {"lane", "bits"}),
        Case("skvq", None, {"order"}),
        Case("amc", None, {"p"}),
        Case("anchorkv", None, {"i0", "i1"}),
        Case("adakv", None, {"t", "n"}),
        Case("adakv", AdaKVOptions(adakv_target_avg_bits=2.0, adakv_lo_bit=2), {"n"}),
        Case("cachegen", CacheGenOptions(cachegen_per_channel=True), set()),
        Case("minicache", MiniCacheOptions(), set()),
        Case("palu", None, set()),
        Case("svdq", None, set()),
        Case("vecinfer", None, set()),
        Case("knorm", None, {"positions"}),
    ],
    ids=lambda case: case.method,
)
def test_the_places_of_a_method(case: Case, tmp_path: Path) -> None:
    config = small_config(row_of(case.method), head_dim=64)
    if case.options is not None:
        config = KVCacheConfig(
            method=case.method, head_dim=64, residual_length=32, options=case.options
        )
    assert check(File(tmp_path, config)) == case.places


@pytest.mark.parametrize(
    ("method", "name"), [("skvq", "order"), ("amc", "p"), ("kvtc", "lane"), ("anchorkv", "i0")]
)
def test_values_a_little_out_of_range_are_refused(method: str, name: str, tmp_path: Path) -> None:
    file = File(tmp_path, small_config(row_of(method), head_dim=64))
    largest = {"order": 64, "p": 64, "lane": 64 * 16, "i0": 60_000}[name]

    def last(a: mx.array) -> mx.array:
        flat = a.flatten()
        flat[-1] = largest
        return flat.reshape(a.shape)

    with pytest.raises(CacheStateError, match=name):
        file.load(file.with_values(name, last))


@pytest.mark.parametrize(("method", "name"), [("skvq", "order"), ("amc", "p")])
def test_an_order_with_a_channel_twice_is_refused(method: str, name: str, tmp_path: Path) -> None:
    file = File(tmp_path, small_config(row_of(method), head_dim=64))
    with pytest.raises(CacheStateError, match="no order"):
        file.load(file.with_values(name, mx.zeros_like))


def test_anchors_of_later_blocks_are_refused(tmp_path: Path) -> None:
    """After a trim they would point outside, though every number is below the anchors held."""
    file = File(tmp_path, small_config(row_of("anchorkv"), head_dim=64))
    anchors = max(a.shape[2] for k, a in file.arrays.items() if k.endswith(".a"))
    with pytest.raises(CacheStateError, match="anchors that are not there"):
        file.load(file.with_values("i0", lambda a: mx.full(a.shape, anchors - 1, dtype=a.dtype)))


def test_a_rewound_cache_still_hands_its_state_over(tmp_path: Path) -> None:
    """Buffers keep what was rewound behind their end."""
    for method in ("adakv", "anchorkv", "kitty", "gear", "kvtc"):
        file = File(tmp_path, small_config(row_of(method), head_dim=64), 400)
        for cache, fresh in zip(file.caches, new_caches(file.plan, file.config), strict=True):
            cache.trim(70)
            fresh.state = cache.state
            assert fresh.size() == 330


def test_queries_of_another_shape_are_refused() -> None:
    tokens = random_tokens(60)
    config = small_config(row_of("snapkv"), head_dim=64)
    cache, twin = (new_caches(plan_of(shape_of(tokens), 1), config)[0] for _ in range(2))
    attend(cache, tokens)
    state = cache.state
    *extra, scorer = state[-1]
    assert scorer[0].shape == (1, 4, 8, 64)
    for shape in ((1, 3, 8, 64), (1, 4, 8, 32), (2, 4, 8, 64)):
        with pytest.raises(CacheStateError, match="saved queries"):
            twin.state = [*state[:-1], [*extra, [mx.zeros(shape), *scorer[1:]]]]
    twin.state = state
    assert twin.size() == 60
