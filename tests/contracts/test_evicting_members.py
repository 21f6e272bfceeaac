"""What the documents say that caches of evicting methods have, on caches that were fed."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import EVICTING, feed, new_cache, random_tokens, shape_of, small_config

from veloxquant.cache.table import MethodRow

LENGTH, WIDTH = 90, 4
KEPT = ("full_seq_bytes", "compression_ratio", "tokens_seen", "tokens_kept")
MEMBERS: dict[str, tuple[str, ...]] = {
    "cam": ("layer_budget", "cam_kept_bytes", *KEPT),
    "chunkkv": ("layer_budget", "chunk_size", "is_index_reuse_leader", "chunkkv_kept_bytes", *KEPT),
    "curdkv": ("state", "curdkv_kept_bytes", *KEPT),
    "h2o": ("state", "h2o_kept_bytes", *KEPT),
    "keyformer": ("keyformer_kept_bytes", *KEPT),
    "knorm": ("knorm_kept_bytes", *KEPT),
    "kvzip": ("kvzip_kept_bytes", *KEPT),
    "morphkv": ("morphkv_kept_bytes", *KEPT),
    "nestedkv": ("nestedkv_kept_bytes", *KEPT),
    "pyramidkv": ("layer_budget", "pyramid_kept_bytes", *KEPT),
    "qfilters": ("qfilters_kept_bytes", *KEPT, "states"),
    "rocketkv": (
        "offset", "state", "stage1_bytes", "stage2_aux_bytes", "full_fp16_bytes_total",
        "compression_ratio", "tokens_kept", "tokens_total", "keep_rate", "stage1_ratio",
        "page_size", "head_topk1",
    ),
    "snapkv": (
        "offset", "evicted_key_bytes", "evicted_value_bytes", "full_key_bytes", "full_value_bytes",
        "tokens_kept", "tokens_total", "eviction_ratio", "keep_rate",
    ),
    "squeeze": ("layer_budget", "concentration", "squeeze_kept_bytes", *KEPT),
    "streaming_llm": (
        "stream_kept_bytes", "full_seq_bytes", "streaming_ratio", "tokens_seen", "tokens_in_window",
        "tokens_kept",
    ),
    "tova": ("state", "tova_kept_bytes", *KEPT),
}  # fmt: skip
SEEN = ("tokens_seen", "tokens_total", "offset")
FULL = ("full_seq_bytes", "full_fp16_bytes_total")


def fed(row: MethodRow, length: int = LENGTH) -> Any:
    tokens = random_tokens(length, dtype=mx.float16)
    cache = new_cache(small_config(row), shape_of(tokens))
    feed(cache, tokens.cut(0, length - 1), 40)
    feed(cache, tokens.cut(length - 1, length))
    cache.commit()
    return cache


def test_every_evicting_method_has_a_line() -> None:
    assert MEMBERS.keys() == {row.name for row in EVICTING}


@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
def test_documented_members_say_what_is_there(row: MethodRow) -> None:
    cache = fed(row)
    said = {name: getattr(cache, name) for name in MEMBERS[row.name]}
    full = 2 * 2 * LENGTH * 64 * 2  # two heads of keys and values in 16 bits
    rows = cache.size()
    assert 0 < rows < LENGTH
    for name, value in said.items():
        if name in SEEN:
            assert value == LENGTH, name
        elif name in FULL:
            assert value == full, name
        elif name == "tokens_kept":
            assert value == rows
        elif name.endswith("_kept_bytes") or name == "stage1_bytes":
            assert value == full * rows // LENGTH, name
        elif name == "layer_budget":
            assert rows <= value < LENGTH, name
    small = said.get("compression_ratio") or said.get("streaming_ratio")
    if small is not None and row.name != "rocketkv":
        assert small == pytest.approx(LENGTH / rows)
    assert callable(cache.update_and_fetch)
    assert cache.is_trimmable() is False
    assert cache.make_mask(1) is None
    assert cache.make_mask(3) == "causal"
    assert cache.trim(3) == 0
    assert not cache.empty()


@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
def test_an_empty_cache_has_them_all(row: MethodRow) -> None:
    cache = new_cache(small_config(row), shape_of(random_tokens(1)))
    for name in MEMBERS[row.name]:
        value = getattr(cache, name)
        if name.endswith("_bytes") or name in SEEN:
            assert value == 0, name
    assert cache.empty()
    assert cache.size() == 0


def test_numbers_of_snapkv_rocketkv_and_streaming_llm() -> None:
    by_name = {row.name: row for row in EVICTING}
    snap = fed(by_name["snapkv"])
    per_row = 2 * 64 * 2
    gone = LENGTH - snap.size()
    assert (snap.full_key_bytes, snap.full_value_bytes) == (LENGTH * per_row, LENGTH * per_row)
    assert (snap.evicted_key_bytes, snap.evicted_value_bytes) == (gone * per_row, gone * per_row)
    assert snap.eviction_ratio == pytest.approx(gone / LENGTH)
    assert snap.keep_rate == pytest.approx(snap.size() / LENGTH)
    rocket = fed(by_name["rocketkv"])
    assert rocket.keep_rate == pytest.approx(rocket.size() / LENGTH)
    assert rocket.stage1_ratio * rocket.size() >= LENGTH * 0.5
    assert (rocket.page_size, rocket.head_topk1 <= 64) == (512, True)
    stream = fed(by_name["streaming_llm"])
    assert (stream.tokens_kept, stream.tokens_in_window) == (32, 28)


def test_states_of_qfilters_are_those_of_single_heads() -> None:
    row = next(row for row in EVICTING if row.name == "qfilters")
    cache = fed(row)
    keys, values = cache.keys(), cache.values()
    assert len(cache.states) == 2
    for head, state in enumerate(cache.states):
        assert (state.n_sink, state.budget, state.head_dim) == (4, 32, 64)
        assert mx.array_equal(state.keys, keys[0, head])
        assert mx.array_equal(state.values, values[0, head])
        want = (keys[0, head] @ state.filter_dir * state.sign).astype(mx.float32)
        assert mx.abs(state.scores - want).max().item() < 1e-2
    empty = new_cache(small_config(row), shape_of(random_tokens(1)))
    assert empty.states == []
