"""Coordinators as the documents name them: layers made by hand, and what is handed over by hand."""

import copy
import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import attend, plan_of, random_tokens, same_state, shape_of

from tests.architectures import DENSE, feed, prompt
from veloxquant.cache.board_coordinators import ChunkKVIndexReuseCoordinator, SqueezeCoordinator
from veloxquant.cache.builder import KVCacheBuilder, new_caches
from veloxquant.cache.group_coordinators import (
    GroupCoordinator,
    MiniCacheCoordinator,
    XKVCoordinator,
    XQuantCoordinator,
)
from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import BASELINE, STANDALONE_METHODS, KVCacheConfig
from veloxquant.config.options import (
    ChunkKVOptions,
    H2OOptions,
    MiniCacheOptions,
    SqueezeAttentionOptions,
    XKVOptions,
    XQuantOptions,
)
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.methods.chunkkv import ChunkKVCache
from veloxquant.methods.h2o import H2OKVCache
from veloxquant.methods.minicache import MiniCacheKVCache
from veloxquant.methods.squeeze import SqueezeAttentionCache
from veloxquant.methods.xkv import XKVCache
from veloxquant.methods.xquant import XQuantKVCache
from veloxquant.quantizers.xkv import joint_svd_compress
from veloxquant.quantizers.xquant import dequant_with_params, quantize_codes

LAYERS, DIM = 4, 64
OPTIONS = {
    "xquant": XQuantOptions(xquant_residual_bits=2),
    "minicache": MiniCacheOptions(minicache_start_frac=0.5, minicache_retention_threshold=0.5),
    "xkv": XKVOptions(xkv_group_size=4, xkv_rank=48),
    "chunkkv": ChunkKVOptions(chunkkv_budget=60, chunkkv_chunk_size=4, chunkkv_reuse_layers=3),
    "squeeze": SqueezeAttentionOptions(squeeze_budget=40),
}
CONFIGS = {
    name: KVCacheConfig(method=name, head_dim=DIM, options=options)
    for name, options in OPTIONS.items()
}


# ---- layers made by hand ---------------------------------------------------------------------


def by_hand(method: str, ropes: list[Any], coordinator: Any = None) -> list[Any]:
    """The caches of four layers as somebody who read the documents makes them."""
    config = CONFIGS[method]
    if method == "xquant":
        shared = coordinator or XQuantCoordinator()
        return [
            XQuantKVCache(config, role, i // 2, shared, n_readers=1)
            for i, role in enumerate(("anchor", "reuse") * 2)
        ]
    if method == "minicache":
        shared = coordinator or MiniCacheCoordinator()
        roles = (("primary", 0, 0), ("primary", 1, 0), ("primary", 2, 1), ("merge", 2, 1))
        return [
            MiniCacheKVCache(config, role, group, shared, readers) for role, group, readers in roles
        ]
    if method == "xkv":
        shared = coordinator or XKVCoordinator()
        return [XKVCache(config, i, 0, LAYERS, shared, rope=ropes[i]) for i in range(LAYERS)]
    if method == "chunkkv":
        shared = coordinator or ChunkKVIndexReuseCoordinator(LAYERS, reuse_layers=3)
        return [ChunkKVCache(config, i, shared) for i in range(LAYERS)]
    shared = coordinator or SqueezeCoordinator(LAYERS, avg_budget=40, n_sink=4, strength=1.0)
    return [SqueezeAttentionCache(config, i, shared) for i in range(LAYERS)]


@functools.cache
def model() -> Any:
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(5)
    made = Model(ModelArgs.from_dict({**DENSE, "model_type": "llama", "num_hidden_layers": LAYERS}))
    made.eval()
    mx.eval(made.parameters())
    return made


@pytest.mark.parametrize("method", ["xquant", "minicache", "xkv", "chunkkv"])
def test_layers_made_by_hand_are_those_of_for_model(method: str) -> None:
    tokens = prompt(600 if method == "xkv" else 150)
    wanted = KVCacheBuilder.for_model(model(), CONFIGS[method])
    ropes = [layer.self_attn.rope for layer in model().layers]
    caches = by_hand(method, ropes)
    for cache in caches:
        assert cache.returns == "arrays"
        cache.returns = "views"
    for made in (wanted, caches):
        feed(model(), tokens[:-3], made)
        for token in tokens[-3:]:
            feed(model(), [token], made)
    for a, b in zip(caches, wanted, strict=True):
        same_state(a, b)
        assert a.nbytes == b.nbytes > 0
    if method in ("xquant", "minicache", "xkv"):
        assert [c.group_id for c in caches] == [c.group_id for c in wanted]
        assert [c.role for c in caches] == [c.role for c in wanted]
        assert caches[-1].keys_stream.body.length > 0


def test_layers_of_squeeze_made_by_hand_are_those_of_a_model_that_hides_its_stream() -> None:
    tokens = [random_tokens(90, seed=i, factor=1.0 + i) for i in range(LAYERS)]
    shared = SqueezeCoordinator(LAYERS, avg_budget=40, n_sink=4, strength=1.0)
    caches = by_hand("squeeze", [], shared)
    wanted = new_caches(plan_of(shape_of(tokens[0]), LAYERS), CONFIGS["squeeze"])
    for made in (caches, wanted):
        for cut in ((0, 80), (80, 81), (81, 90)):
            for cache, one in zip(made, tokens, strict=True):
                cache.returns = "views"
                mx.eval(attend(cache, one.cut(*cut)))
    for a, b in zip(caches, wanted, strict=True):
        same_state(a, b)
    assert shared.is_finalized
    told = [shared.resolved_budget(i) for i in range(LAYERS)]
    assert told == [c.layer_budget for c in caches]
    assert sum(c.layer_budget for c in caches) == 40 * LAYERS
    assert len(set(told)) > 1


@pytest.mark.parametrize("method", list(OPTIONS))
def test_a_layer_of_the_configuration_alone_is_by_itself(method: str) -> None:
    made = {
        "xquant": XQuantKVCache, "minicache": MiniCacheKVCache, "xkv": XKVCache,
        "chunkkv": ChunkKVCache, "squeeze": SqueezeAttentionCache,
    }[method](CONFIGS[method])  # fmt: skip
    wanted = KVCacheBuilder().with_method(method).with_head_dim(DIM)
    wanted._fields["options"] = OPTIONS[method]
    alone = wanted.build()
    tokens = random_tokens(100, seed=7)
    for cache in (made, alone):
        for cut in ((0, 99), (99, 100)):
            mx.eval(attend(cache, tokens.cut(*cut)))
    same_state(made, alone)


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (XQuantKVCache, ["config", "role", "group_id", "coordinator", "n_readers"]),
        (MiniCacheKVCache, ["config", "role", "group_id", "coordinator", "n_readers"]),
        (XKVCache, ["config", "member_idx", "group_id", "n_members", "coordinator"]),
        (ChunkKVCache, ["config", "layer_id", "coordinator"]),
        (SqueezeAttentionCache, ["config", "layer_id", "coordinator"]),
        (H2OKVCache, ["config"]),
    ],
)
def test_help_shows_the_documented_parameters(made: type, names: list[str]) -> None:
    parameters = inspect.signature(made).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    assert [n for n, p in parameters.items() if p.kind in kinds] == names


@pytest.mark.parametrize("method", [name for name in TABLE if name != BASELINE])
def test_every_class_takes_the_configuration_alone(method: str) -> None:
    config = KVCacheConfig(method=method, head_dim=DIM)
    built = KVCacheBuilder().with_method(method).with_head_dim(DIM).build()
    assert type(type(built)(config)) is type(built)


@pytest.mark.parametrize("method", [m for m in TABLE if m not in (BASELINE, *STANDALONE_METHODS)])
def test_a_subclass_is_made_like_its_parent(method: str) -> None:
    parent = type(KVCacheBuilder().with_method(method).with_head_dim(DIM).build())
    child = type(parent)("Mine", (parent,), {"note": "mine", "__module__": __name__})
    config, tokens = KVCacheConfig(method=method, head_dim=DIM), random_tokens(150, seed=3)
    made, usual = child(config), parent(config)
    assert (type(made), made.note, type(usual)) == (child, "mine", parent)
    assert mx.array_equal(attend(made, tokens), attend(usual, tokens)).item()
    assert (made.nbytes, made.size()) == (usual.nbytes, usual.size())
    assert type(copy.deepcopy(made)) is child
    grandchild = type(parent)("Own", (child,), {"__module__": __name__})
    assert type(grandchild(config)) is grandchild
    other = "tova" if method != "tova" else "h2o"
    with pytest.raises(QuantizerConfigError, match=f"Mine was given .*set method='{method}'"):
        child(KVCacheConfig(method=other))


def test_an_init_of_a_subclass_hands_on_what_it_gets() -> None:
    class Noted(H2OKVCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.note = self.size()

    assert Noted(KVCacheConfig(method="h2o", head_dim=DIM)).note == 0


def test_settings_that_every_method_takes_are_applied_by_hand_too() -> None:
    config = KVCacheConfig(
        method="h2o", head_dim=DIM, options=H2OOptions(h2o_budget=32), eviction_storage="affine4"
    )
    tokens = random_tokens(60, seed=8)
    packed, exact = H2OKVCache(config), H2OKVCache(config.with_fields(eviction_storage="exact"))
    for cache in (packed, exact):
        attend(cache, tokens)
        cache.commit()
    assert packed.nbytes < 0.5 * exact.nbytes


def test_settings_are_checked_by_hand() -> None:
    with pytest.raises(QuantizerConfigError, match="h2o_budget"):
        H2OKVCache(KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=2)))
    with pytest.raises(QuantizerConfigError, match="set method='h2o'"):
        H2OKVCache(KVCacheConfig(method="tova"))
    with pytest.raises(TypeError, match="group"):
        H2OKVCache(KVCacheConfig(method="h2o"), group=3)


# ---- who may join whom -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [1.0, 0.5, True, "1"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("n_readers", lambda n: XQuantKVCache(CONFIGS["xquant"], n_readers=n)),
        ("group_id", lambda n: MiniCacheKVCache(CONFIGS["minicache"], group_id=n)),
        ("n_readers", lambda n: MiniCacheKVCache(CONFIGS["minicache"], n_readers=n)),
        ("member_idx", lambda n: XKVCache(CONFIGS["xkv"], n, 0, 2)),
        ("n_members", lambda n: XKVCache(CONFIGS["xkv"], 0, 0, n)),
        ("layer_id", lambda n: ChunkKVCache(CONFIGS["chunkkv"], n)),
        ("layer_id", lambda n: SqueezeAttentionCache(CONFIGS["squeeze"], n)),
        ("layer_id", lambda n: ChunkKVIndexReuseCoordinator(4, 2).leader_for(n)),
        ("layer_id", lambda n: SqueezeCoordinator(4, 40, 4, 1.0).resolved_budget(n)),
        ("n_layers", lambda n: SqueezeCoordinator(n, 40, 4, 1.0)),
        ("avg_budget", lambda n: SqueezeCoordinator(4, n, 0, 1.0)),
        ("n_sink", lambda n: SqueezeCoordinator(4, 40, n, 1.0)),
        ("reuse_layers", lambda n: ChunkKVIndexReuseCoordinator(4, n)),
        ("max_ctx", lambda n: XKVCoordinator(n)),
        ("n_readers", lambda n: XQuantCoordinator()._segments.put(0, 0, 4, None, 0, n)),
        ("token_start", lambda n: XQuantCoordinator()._segments.reach(0, n, 4)),
        ("n_tokens", lambda n: XQuantCoordinator()._segments.reach(0, 0, n)),
    ],
)
def test_numbers_that_are_no_integers_are_refused_by_name(
    name: str, make: Callable[[Any], Any], bad: Any
) -> None:
    with pytest.raises((QuantizerConfigError, ValueError), match=f"{name}={bad!r} .*"):
        make(bad)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda c: XQuantKVCache(CONFIGS["xquant"], "reuse"), "same coordinator"),
        (lambda c: XQuantKVCache(CONFIGS["xquant"], "reuse", 0, c), "no first layer"),
        (lambda c: XQuantKVCache(CONFIGS["xquant"], "primary", 0, c), "role='primary'"),
        (lambda c: XQuantKVCache(CONFIGS["xquant"], n_readers=-1, coordinator=c), "group of 0"),
        (lambda c: MiniCacheKVCache(CONFIGS["minicache"], n_readers=2), "n_readers=2"),
        (lambda c: XKVCache(CONFIGS["xkv"], 2, 0, 2, c), "member_idx=2"),
        (lambda c: XKVCache(CONFIGS["xkv"], 0, 0, 2), "same coordinator"),
        (lambda c: XKVCache(CONFIGS["xkv"], 1, 0, 2, c), "no first layer"),
    ],
)
def test_places_that_cannot_be_are_refused(make: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(QuantizerConfigError, match=match):
        make(XKVCoordinator())


def test_a_group_takes_as_many_layers_as_were_said_in_order_and_alike() -> None:
    config, shared = CONFIGS["xkv"], XKVCoordinator()
    first = XKVCache(config, 0, 7, 3, shared)
    with pytest.raises(QuantizerConfigError, match="in order"):
        XKVCache(config, 2, 7, 3, shared)
    with pytest.raises(QuantizerConfigError, match="one size"):
        XKVCache(config, 1, 7, 2, shared)
    for other in (config.with_fields(xkv_rank=8), config.with_fields(head_dim=128)):
        with pytest.raises(QuantizerConfigError, match="one configuration"):
            XKVCache(other, 1, 7, 3, shared)
    rest = [XKVCache(config, i, 7, 3, shared) for i in (1, 2)]
    assert [c.member_idx for c in (first, *rest)] == [0, 1, 2]
    assert {c.group_id for c in (first, *rest)} == {7}
    xquant = XQuantCoordinator()
    anchor = XQuantKVCache(CONFIGS["xquant"], "anchor", 0, xquant)
    reader = XQuantKVCache(CONFIGS["xquant"], "reuse", 0, xquant)
    with pytest.raises(QuantizerConfigError, match="all of its 2 layers"):
        XQuantKVCache(CONFIGS["xquant"], "reuse", 0, xquant)
    assert (anchor.role, reader.role) == ("anchor", "reuse")


def test_the_first_layer_made_again_begins_another_sequence() -> None:
    shared = XQuantCoordinator()
    config = CONFIGS["xquant"]
    old = [XQuantKVCache(config, role, 0, shared) for role in ("anchor", "reuse")]
    new = [XQuantKVCache(config, role, 0, shared) for role in ("anchor", "reuse")]
    assert old[0].group is old[1].group is not new[0].group is new[1].group
    lost = [XQuantKVCache(config, "anchor", 1, shared)]
    lost.clear()
    with pytest.raises(QuantizerConfigError, match="lost one"):
        XQuantKVCache(config, "reuse", 1, shared)


@pytest.mark.parametrize("method", ["minicache", "xkv"])
def test_tokens_beyond_the_coordinators_context_stay_exact(method: str) -> None:
    if method == "minicache":
        shared: Any = MiniCacheCoordinator(max_ctx=64)
        made = [MiniCacheKVCache(CONFIGS[method], r, 0, shared) for r in ("primary", "merge")]
    else:
        shared = XKVCoordinator(max_ctx=544)
        made = [XKVCache(CONFIGS[method], i, 0, 2, shared) for i in range(2)]
    for cache in made:
        attend(cache, random_tokens(700, seed=3))
    made[0].group.settle()
    assert [c.keys_stream.body.length for c in made] == [shared.max_ctx] * 2
    if method == "xkv":
        exact = made[1].values_stream.window.nbytes
        assert made[1].value_fp16_bytes == exact > 0
    assert shared.published_tokens(0) == shared.max_ctx
    assert shared.nbytes == 0, "caches hold what they share themselves"


def test_copies_of_layers_made_by_hand_share_among_themselves() -> None:
    shared = XQuantCoordinator()
    made = by_hand("xquant", [], shared)
    twins = copy.deepcopy(made)
    assert twins[0].group is twins[1].group is not made[0].group
    assert twins[2].group_id == 1


def settled_memory() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_memory_of_layers_made_by_hand_goes_with_them() -> None:
    def made_and_fed(shared: XQuantCoordinator) -> list[Any]:
        made = by_hand("xquant", [], shared)
        for i, cache in enumerate(made):
            mx.eval(attend(cache, random_tokens(300, seed=i)))
        for cache in made:
            cache.commit()
        mx.eval([a for cache in made for a in cache.arrays()])
        return made

    shared = XQuantCoordinator()
    made_and_fed(shared)
    base = settled_memory()
    made = made_and_fed(shared)
    said = sum(cache.nbytes for cache in made)
    assert abs(settled_memory() - base - said) <= 0.05 * said + (64 << 10)
    del made
    assert settled_memory() - base <= 64 << 10, "the coordinator still holds rows"


# ---- handed over by hand ---------------------------------------------------------------------


@pytest.mark.parametrize("made", [XQuantCoordinator, MiniCacheCoordinator, XKVCoordinator])
def test_a_coordinator_is_made_for_a_context(made: type[GroupCoordinator[Any]]) -> None:
    assert made().max_ctx == 8192
    assert made(max_ctx=64).max_ctx == 64
    assert made().published_tokens(3) == 0
    with pytest.raises(QuantizerConfigError, match="max_ctx=0"):
        made(max_ctx=0)


def hand_over(shared: Any, start: int, n: int, group: int = 0, readers: int = 1) -> Any:
    """Give `n` tokens to a coordinator; what a reader should find."""
    keys = random_tokens(n, seed=start).keys[0, 0]
    if isinstance(shared, XQuantCoordinator):
        codes, params = quantize_codes(keys, 2)
        shared.register_anchor(group, start, n, codes, params, readers)
        return dequant_with_params(codes, params)
    shared.publish_primary(group, start, n, keys, -keys, n_readers=readers)
    return keys


def fetched(shared: Any, start: int, group: int = 0) -> Any:
    if isinstance(shared, XQuantCoordinator):
        segment = shared.fetch_anchor(group, start)
        return segment and dequant_with_params(segment.codes, segment.params)
    segment = shared.fetch_primary(group, start)
    return segment and segment.keys


@pytest.mark.parametrize("made", [XQuantCoordinator, MiniCacheCoordinator])
def test_segments_go_when_all_readers_had_them(made: type[Any]) -> None:
    shared = made(max_ctx=128)
    wanted = hand_over(shared, 0, 32, readers=2)
    held = shared.nbytes
    assert held > 0
    hand_over(shared, 32, 32)
    assert shared.nbytes > held
    assert shared.published_tokens(0) == 64
    assert fetched(shared, 16) is None
    assert fetched(shared, 0, group=1) is None
    for _ in range(2):
        assert mx.array_equal(fetched(shared, 0), wanted).item()
    assert fetched(shared, 0) is None
    assert fetched(shared, 32) is not None
    assert shared.nbytes == 0
    assert shared.published_tokens(0) == 64, "what was read stays counted"


@pytest.mark.parametrize("made", [XQuantCoordinator, MiniCacheCoordinator])
def test_segments_beyond_the_context_are_refused(made: type[Any]) -> None:
    shared = made(max_ctx=64)
    hand_over(shared, 32, 32)
    with pytest.raises(QuantizerConfigError, match=r"ends at token 65.*max_ctx=64"):
        hand_over(shared, 33, 32)
    assert shared.published_tokens(0) == 64
    hand_over(shared, 0, 8, group=1)
    for start, n, readers in ((-1, 8, 1), (0, 0, 1), (0, 8, -1)):
        with pytest.raises(ValueError, match=r"no segment|number of layers"):
            shared._segments.put(0, start, n, None, 0, readers)


@pytest.mark.parametrize("made", [XQuantCoordinator, MiniCacheCoordinator])
def test_nothing_waits_for_nobody_or_after_a_reset(made: type[Any]) -> None:
    shared = made()
    hand_over(shared, 0, 16, readers=0)
    assert (shared.nbytes, shared.published_tokens(0)) == (0, 16)
    hand_over(shared, 16, 16)
    shared.reset()
    assert (shared.nbytes, shared.published_tokens(0)) == (0, 0)
    assert fetched(shared, 16) is None


def test_a_basis_is_there_once_every_member_gave_its_keys() -> None:
    shared = XKVCoordinator(max_ctx=100)
    keys = [random_tokens(60, seed=i).keys[0, 0] for i in range(3)]
    for i in (2, 0):
        shared.publish_member_keys(0, i, 0, 60, keys[i])
        assert shared.get_shared_basis(0, 0, 3) is None
    held = shared.nbytes
    assert held == keys[0].nbytes + keys[2].nbytes
    shared.publish_member_keys(0, 1, 0, 60, keys[1])
    basis = shared.get_shared_basis(0, 0, 3, rank=8)
    assert basis is not None
    for got, wanted in zip(basis, joint_svd_compress(keys, 8), strict=True):
        assert mx.allclose(got, wanted, atol=1e-5).item()
    assert shared.get_shared_basis(0, 0, 3, rank=8) is basis
    assert shared.nbytes == sum(a.nbytes for a in basis) < held, "the keys are gone"
    with pytest.raises(CacheStateError, match="keys are gone"):
        shared.get_shared_basis(0, 0, 3, rank=4)
    shared.publish_member_keys(0, 0, 0, 60, keys[0])
    assert shared.get_shared_basis(0, 0, 3) is None
    assert shared.published_tokens(0) == 60
    with pytest.raises(QuantizerConfigError, match="max_ctx=100"):
        shared.publish_member_keys(0, 0, 60, 41, keys[0])
    shared.reset()
    assert (shared.nbytes, shared.published_tokens(0)) == (0, 0)


# ---- budgets and indices ---------------------------------------------------------------------


def test_budgets_are_there_once_every_layer_reported() -> None:
    shared = SqueezeCoordinator(n_layers=4, avg_budget=100, n_sink=4, strength=1.0)
    assert (shared.n_layers, shared.avg_budget, shared.strength) == (4, 100, 1.0)
    values = [0.2, 0.9, 0.5, 0.3]
    for i, value in enumerate(values):
        assert not shared.is_finalized
        assert shared.resolved_budget(i) is None
        shared.report_concentration(i, value)
    budgets = [shared.resolved_budget(i) for i in range(4)]
    assert shared.is_finalized
    assert sum(b or 0 for b in budgets) == 400
    assert budgets[1] == 30
    assert min(budgets[0] or 0, budgets[2] or 0) > 100
    with pytest.raises(CacheStateError, match="reset"):
        shared.report_concentration(0, 0.5)
    shared.reset()
    assert not shared.is_finalized
    assert shared.resolved_budget(0) is None


def test_a_cache_and_reports_by_hand_agree() -> None:
    shared = SqueezeCoordinator(3, avg_budget=40, n_sink=4, strength=1.0)
    config = CONFIGS["squeeze"].with_fields(squeeze_budget=512)
    cache = SqueezeAttentionCache(config, 1, shared)
    shared.report_concentration(0, -0.9)
    shared.report_concentration(2, -0.5)
    with pytest.raises(CacheStateError, match="reports by itself"):
        shared.report_concentration(1, 0.5)
    tokens = random_tokens(81, seed=4)
    for cut in ((0, 79), (79, 80), (80, 81)):
        mx.eval(attend(cache, tokens.cut(*cut)))
    assert shared.resolved_budget(1) == cache.layer_budget == 12
    cache.commit()
    assert cache.rows == 12
    assert sum(shared.resolved_budget(i) or 0 for i in range(3)) == 120
    SqueezeAttentionCache(config, 1, shared)
    assert not shared.is_finalized, "another sequence begins"


@pytest.mark.parametrize(
    "settings",
    [(0, 40, 4, 1.0), (2, 4, 4, 1.0), (2, 40, -1, 1.0), (2, 40, 4, 1.5)],
)
def test_coordinators_of_budgets_that_cannot_be_are_refused(settings: Any) -> None:
    with pytest.raises(QuantizerConfigError):
        SqueezeCoordinator(*settings)


def test_layers_of_a_block_follow_its_first_one() -> None:
    shared = ChunkKVIndexReuseCoordinator(n_layers=5, reuse_layers=2)
    assert (shared.n_layers, shared.reuse_layers) == (5, 2)
    assert [shared.leader_for(i) for i in range(5)] == [0, 0, 2, 2, 4]
    assert [shared.is_leader(i) for i in range(5)] == [True, False, True, False, True]
    assert shared.fetch(1, 0) is None
    shared.publish(0, 0, [[0, 1], [0, 2]])
    shared.publish(0, 1, [[3]])
    assert shared.fetch(1, 0) == [[0, 1], [0, 2]]
    assert shared.fetch(0, 1) == [[3]]
    assert shared.fetch(3, 0) is None
    shared.publish(0, 0, [[4]])
    assert shared.fetch(1, 0) == [[4]]
    with pytest.raises(ValueError, match="only that one publishes"):
        shared.publish(1, 0, [[0]])
    caches = [ChunkKVCache(CONFIGS["chunkkv"], i, shared) for i in range(5)]
    assert [c.is_index_reuse_leader for c in caches] == [True, False, True, False, False]


@pytest.mark.parametrize("layer", [-1, 5, None])
def test_layers_that_a_coordinator_does_not_know_are_refused(layer: Any) -> None:
    chunks = ChunkKVIndexReuseCoordinator(5, 2)
    rows = SqueezeCoordinator(5, 40, 4, 1.0)
    with pytest.raises(ValueError, match="layer_id"):
        ChunkKVCache(CONFIGS["chunkkv"], layer, chunks)
    with pytest.raises(ValueError, match="layer_id"):
        SqueezeAttentionCache(CONFIGS["squeeze"], layer, rows)
    if layer is not None:
        with pytest.raises(ValueError, match="layer_id"):
            chunks.leader_for(layer)
        with pytest.raises(ValueError, match="layer_id"):
            rows.resolved_budget(layer)
    with pytest.raises(QuantizerConfigError, match="reuse_layers=0"):
        ChunkKVIndexReuseCoordinator(5, 0)
    with pytest.raises(ValueError, match="not finite"):
        rows.report_concentration(0, float("nan"))


def test_layers_of_a_block_choose_with_the_same_settings() -> None:
    coordinator = ChunkKVIndexReuseCoordinator(2, 2)
    options = [ChunkKVOptions(chunkkv_budget=b, chunkkv_reuse_layers=2) for b in (60, 100)]
    first, second = (KVCacheConfig(method="chunkkv", head_dim=64, options=one) for one in options)
    ChunkKVCache(first, 0, coordinator)
    with pytest.raises(QuantizerConfigError, match="chunkkv_budget=100 of layer 1"):
        ChunkKVCache(second, 1, coordinator)


def test_layers_that_share_codes_hold_rows_of_one_shape() -> None:
    coordinator = XQuantCoordinator()
    config = KVCacheConfig(method="xquant", head_dim=64)
    layers = [XQuantKVCache(config, role, 0, coordinator) for role in ("anchor", "reuse")]
    layers[0].update_and_fetch(*(mx.ones((1, 2, 40, 64)),) * 2)
    layers[0].commit()
    layers[1].update_and_fetch(*(mx.ones((1, 4, 40, 64)),) * 2)
    with pytest.raises(CacheStateError, match="of one shape; these hold"):
        layers[1].commit()
