"""Every method that gives up tokens, at a budget of so many rows; and eviction by lot."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from veloxquant.artifacts import InMemoryArtifactStore
from veloxquant.benchmarks.rivals import random_caches
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.calibration import fingerprint, fit_method
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.cache.sampling import collect
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.specs.pages import SPLIT_BASE, SPLIT_SLOPE

SINKS = 4
"""First rows that every method keeps at its defaults."""
RECENT = 32
"""Newest rows that eviction by lot keeps of a prompt, as the methods with a window do."""

BUDGETS: Mapping[str, str] = {
    "streaming_llm": "stream_window_size",
    "snapkv": "snap_budget",
    "pyramidkv": "pyramid_budget",
    "squeeze": "squeeze_budget",
    "h2o": "h2o_budget",
    "tova": "tova_budget",
    "chunkkv": "chunkkv_budget",
    "cam": "cam_budget",
    "knorm": "knorm_budget",
    "qfilters": "qfilters_budget",
    "keyformer": "keyformer_budget",
    "morphkv": "morphkv_budget",
    "kvzip": "kvzip_budget",
    "curdkv": "curdkv_budget",
    "nestedkv": "nestedkv_budget",
    "rocketkv": "rocketkv_compression_ratio",
}
"""The setting of each method that says how many rows stay."""

EXACT = "fp16 (exact)"
Reads = Literal["tape", "text", "repeat"]
READ_TEXT = frozenset({"streaming_llm", "knorm", "qfilters"})
"""Methods that give up rows while a prompt is read, so that later tokens see fewer of them."""


EXCUSED: Mapping[str, str] = {
    "keyformer": "keyformer_recent is 0: of the newest tokens, which have collected nothing yet, "
    "only one stays; the paper keeps a quarter of the budget for them",
}
"""Why a method at its defaults may find less than the lot."""


@dataclass(frozen=True)
class Keeper:
    """Something to measure at one budget.

    Attributes:
        name: the method, with its variant.
        kind: exact, ours or random.
        reads: how it comes to the end of a prompt: by what an exact reading gave ("tape"), through
            the model ("text"), or by a tape and a second reading that repeats it ("repeat").
        make: new caches of all layers.
        method: name of the method table, empty for the exact cache and the lot.
    """

    name: str
    kind: Literal["exact", "ours", "random"]
    reads: Reads
    make: Callable[[], list[Any]]
    method: str = ""


def config_of(method: str, rows: int, **fields: Any) -> KVCacheConfig:
    """A method at its defaults but for the budget: `rows` rows a KV head, the mean over layers."""
    value: float = rows
    if method == "streaming_llm":
        value = rows - SINKS
    config = KVCacheConfig(method=method).with_fields(**{BUDGETS[method]: value}, **fields)
    if method == "qfilters":
        config = config.with_fields(qfilters_on_low_retention="ignore")
    return config


def rocket_ratio(share: float) -> float:
    """The ratio at which rocketkv keeps this share of a prompt's rows.

    Its first stage takes the part 0.2 + 0.06·log2(ratio) of the ratio's logarithm.
    """
    kept = math.log2(1 / share)
    root = math.sqrt(SPLIT_BASE**2 + 4 * SPLIT_SLOPE * kept)
    return 2 ** ((root - SPLIT_BASE) / (2 * SPLIT_SLOPE))


def filters_of(plan: ModelPlan, tokens: list[int]) -> InMemoryArtifactStore:
    """A store with the filters of qfilters, measured on these tokens."""
    store = InMemoryArtifactStore()
    config = KVCacheConfig(method="qfilters")
    fitted = fit_method(plan, collect(plan, tokens), config)
    store.save_calibration(fingerprint(plan.model), "qfilters", fitted)
    return store


def keepers(
    model: Any, prompt: int, share: float, filters: InMemoryArtifactStore | None
) -> Iterator[Keeper]:
    """Every method and the lot, with the budget of a share of a prompt's tokens.

    Args:
        model: an mlx-lm model.
        prompt: tokens of the prompt.
        share: of them that may stay.
        filters: a calibration of qfilters; without one it takes its filters from the prompt.
    """
    rows = round(share * prompt)
    yield from _lots(plan_model(model, KVCacheConfig(method="snapkv")), rows)
    for method in BUDGETS:
        store: dict[str, Any] = {}
        if method == "qfilters":
            # Never the user's own: the figures would depend on what was computed before.
            store = {"store": filters or InMemoryArtifactStore()}
        config = config_of(method, rows, **store)
        if method == "rocketkv":
            config = config.with_fields(rocketkv_compression_ratio=rocket_ratio(share))
        reads: Reads = "text" if method in READ_TEXT else "tape"
        if method != "kvzip":
            yield Keeper(method, "ours", reads, _maker(model, config), method)
            continue
        yield Keeper("kvzip context", "ours", reads, _maker(model, config), method)
        again = config.with_fields(kvzip_probe="reconstruct")
        yield Keeper("kvzip reconstruct", "ours", "repeat", _maker(model, again), method)
        again = again.with_fields(kvzip_scope="model")
        yield Keeper("kvzip reconstruct, model", "ours", "repeat", _maker(model, again), method)


def exact(model: Any) -> Keeper:
    """The cache that keeps everything."""
    return Keeper(EXACT, "exact", "tape", lambda: native_caches(model))


def _maker(model: Any, config: KVCacheConfig) -> Callable[[], list[Any]]:
    plan = plan_model(model, config)
    return lambda: new_caches(plan, config)


def _lots(plan: ModelPlan, rows: int) -> Iterator[Keeper]:
    yield Keeper(
        "random", "random", "tape", lambda: random_caches(plan, rows, SINKS, RECENT, "prompt")
    )
    yield Keeper(
        "random, always", "random", "text", lambda: random_caches(plan, rows, SINKS, 1, "always")
    )
