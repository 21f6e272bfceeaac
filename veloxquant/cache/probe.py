"""Which layers of a model can be compressed, and how: found out by running two tokens through it.

No list of architectures: the model makes its own caches, plain attention caches are replaced by
recorders that hand out views, and a forward pass shows shapes, query heads and whether the model's
attention reaches the hook. A model that takes arrays apart itself fails loudly on a view; it gets
arrays instead, decoded for the call and not kept. A model that reaches into its caches keeps them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from veloxquant.cache.hook import attach
from veloxquant.cache.recorder import Recorder
from veloxquant.cache.residual import Site
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

PROBE_TOKENS = 2
Path = tuple[int, ...]
# What a model file may raise when it meets an object that it does not know.
_FOREIGN = (TypeError, AttributeError, ValueError, IndexError, KeyError, RuntimeError)
_NATIVE_REASON = {
    "RotatingKVCache": "a sliding window, bounded by itself",
    "ChunkedKVCache": "attention within chunks, bounded by itself",
    "ArraysCache": "a recurrent state of fixed size",
}
_LATENT = "a latent shared by all heads, small already"
_BATCH_TOLERANCE = 0.02
"""Largest difference of logits between a batch and single sequences, of the largest logit."""


@dataclass
class LayerReport:
    """What happens to one cache entry: `path` is its place in the model's list."""

    path: Path
    kind: Literal["compressed", "native"]
    reason: str
    shape: LayerShape | None = None


@dataclass
class ModelPlan:
    """The result of a probe; `new_caches` in `cache/builder.py` builds from it.

    `returns` says whether attention comes through the hook ("views") or the caches hand out arrays
    decoded for the call; `mask_axes` is the rank of the mask that such a model takes in a batch.
    `artifacts` holds the calibration of each compressed entry, nothing without one, and `fitted`
    what that calibration says of itself, None without. `sites` says
    where the layers of the compressed entries show the residual stream, None until that is asked.
    `no_batch` is the reason why sequences cannot share a batch, empty when they can. `warnings`
    are sentences for people.
    """

    model: Any
    layers: list[LayerReport]
    returns: Literal["views", "arrays"]
    array_masks: bool = False
    window: int | None = None
    warnings: list[str] = field(default_factory=list)
    ropes: dict[Path, Any] = field(default_factory=dict)
    no_batch: str = ""
    mask_axes: int = 4
    artifacts: list[Mapping[str, Any]] = field(default_factory=list)
    fitted: Mapping[str, Any] | None = None
    sites: Mapping[Path, Site] | None = None

    @property
    def compressed(self) -> int:
        """Number of entries that are compressed."""
        return sum(layer.kind == "compressed" for layer in self.layers)

    @property
    def n_layers(self) -> int:
        """Number of cache entries, nested ones counted singly."""
        return len(self.layers)

    @property
    def batchable(self) -> bool:
        """Whether sequences can share a batch."""
        return not self.no_batch

    def shapes(self) -> list[LayerShape]:
        """Shapes of the compressed entries."""
        return [layer.shape for layer in self.layers if layer.shape and layer.kind == "compressed"]


def native_caches(model: Any) -> list[Any]:
    """The caches that the model itself would use, newly made.

    A `make_cache` that was set on the model afterwards, by us or others, is passed over.

    Raises:
        QuantizerConfigError: when the model's own `make_cache` fails.
    """
    from mlx_lm.models.cache import KVCache, make_prompt_cache  # loads transformers: only when used

    try:
        if "make_cache" in getattr(model, "__dict__", ()):
            own = getattr(type(model), "make_cache", None)
            return own(model) if own else [KVCache() for _ in model.layers]
        return make_prompt_cache(model)
    except _FOREIGN as error:
        raise QuantizerConfigError(
            f"{type(model).__module__} cannot make its own caches ({_first_line(error)}); "
            f"the model itself needs repair before a method can serve it"
        ) from error


def replace_plain(entry: Any, path: Path, make: Callable[[Path], Any]) -> Any:
    """`entry` with every plain attention cache in it replaced by `make(path)`, None to keep it."""
    from mlx_lm.models.cache import CacheList, KVCache

    if type(entry) is KVCache:
        made = make(path)
        return entry if made is None else made
    if isinstance(entry, CacheList):
        inner = [replace_plain(c, (*path, i), make) for i, c in enumerate(entry.caches)]
        return CacheList(*inner)
    return entry


def probe(model: Any) -> ModelPlan:
    """Run a few tokens through the model and report on every cache entry.

    Raises:
        QuantizerConfigError: when the model fails with its own caches too.
    """
    attach()
    plan = ModelPlan(model, [], "views")
    recorders = _record(plan)
    is_latent = plan.returns == "arrays" and _has_latent(model)
    for i, entry in enumerate(native_caches(model)):
        _report(entry, (i,), recorders, plan, is_latent=is_latent)
    ours = [recorders[layer.path] for layer in plan.layers if layer.kind == "compressed"]
    if not ours and is_latent:
        plan.returns, plan.warnings = "views", []
    plan.array_masks = any(r.array_mask for r in ours)
    plan.window = next((r.window for r in ours if r.window), None)
    plan.ropes = _find_ropes(model, plan.layers)
    _check_batch(plan)
    return plan


# ---- running the model ----------------------------------------------------------------------


def _caches(model: Any, make: Callable[[Path], Any]) -> list[Any]:
    return [replace_plain(c, (i,), make) for i, c in enumerate(native_caches(model))]


def _run(model: Any, *, views: bool) -> dict[Path, Recorder]:
    recorders: dict[Path, Recorder] = {}

    def make(path: Path) -> Recorder:
        recorders[path] = Recorder(views=views)
        return recorders[path]

    caches = _caches(model, make)
    tokens = mx.array([[1] * PROBE_TOKENS])
    mx.eval(model(tokens, cache=caches))
    mx.eval(model(tokens[:, :1], cache=caches))
    return recorders


def _record(plan: ModelPlan) -> dict[Path, Recorder]:
    """Run with views, else with arrays, else with the model's own caches."""
    try:
        recorders = _run(plan.model, views=True)
        missed = [p for p, r in recorders.items() if r.rows is not None and r.n_q_heads is None]
        if not missed:
            return recorders
        why = f"cache entry {missed[0][0]} is read, but its attention does not reach the hook"
    except _FOREIGN as error:
        why = _first_line(error)
    plan.returns = "arrays"
    try:
        recorders = _run(plan.model, views=False)
    except _FOREIGN as error:
        plan.warnings.append(
            f"This model works inside its caches ({_first_line(error)}); its own caches are used, "
            f"uncompressed."
        )
        return _run_native(plan.model)
    plan.warnings.append(
        f"This model computes attention itself ({why}), so packed caches are unpacked for each "
        f"call: memory is saved, speed is not, and scores use keys only."
    )
    return recorders


def _run_native(model: Any) -> dict[Path, Recorder]:
    """Make sure that the model runs at all; nothing is recorded."""
    try:
        mx.eval(model(mx.array([[1] * PROBE_TOKENS]), cache=native_caches(model)))
    except _FOREIGN as error:
        raise QuantizerConfigError(
            f"{type(model).__module__} fails with its own caches ({_first_line(error)}); "
            f"no method can serve it"
        ) from error
    return {}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


# ---- reporting ------------------------------------------------------------------------------


def _has_latent(model: Any) -> bool:
    """Whether the model caches a low-rank latent instead of keys and values."""
    for part in (model, getattr(model, "language_model", None), getattr(model, "model", None)):
        for name in ("args", "config"):
            args = getattr(part, name, None)
            text = getattr(args, "text_config", None)
            if getattr(args, "kv_lora_rank", None) is not None:
                return True
            if isinstance(text, dict) and text.get("kv_lora_rank") is not None:
                return True
    return False


def _report(
    entry: Any,
    path: Path,
    recorders: dict[Path, Recorder],
    plan: ModelPlan,
    *,
    is_latent: bool,
) -> None:
    inner = getattr(entry, "caches", None)
    if inner is not None:
        for i, cache in enumerate(inner):
            _report(cache, (*path, i), recorders, plan, is_latent=is_latent)
        return
    seen, name = recorders.get(path), type(entry).__name__
    shape = None
    if seen is not None and seen.rows is not None:
        keys, values = seen.rows
        heads = keys.shape[1]
        shape = LayerShape(
            seen.n_q_heads or heads, heads, keys.shape[3], values.shape[3], keys.dtype.size
        )
    if is_latent and name == "KVCache":
        report = LayerReport(path, "native", _LATENT, shape)
    elif seen is None:
        reason = _NATIVE_REASON.get(name, f"the model works inside its {name}")
        report = LayerReport(path, "native", reason)
    elif shape is None:
        report = LayerReport(path, "native", "unused by the model")
    else:
        report = LayerReport(path, "compressed", "full attention", shape)
    plan.layers.append(report)


def _find_ropes(model: Any, reports: Sequence[LayerReport]) -> dict[Path, Any]:
    """Position encodings of the entries, where the model's layers correspond to them one to one.

    Models may have more layers than entries: the last ones then share the entries of earlier ones.
    """
    layers = getattr(model, "layers", None) or []
    ropes: dict[Path, Any] = {}
    for report in reports:
        if report.kind != "compressed" or report.path[0] >= len(layers):
            continue
        layer = layers[report.path[0]]
        attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
        rope = getattr(attention, "rope", None)
        if rope is not None:
            ropes[report.path] = rope
    return ropes


# ---- batches --------------------------------------------------------------------------------


def _check_batch(plan: ModelPlan) -> None:
    """Say whether sequences can share a batch, and which mask a model of its own kind takes."""
    entries = native_caches(plan.model)
    alone = next((type(e).__name__ for e in entries if not hasattr(e, "merge")), None)
    if alone is not None:
        plan.no_batch = f"{alone} holds one sequence only"
        return
    if plan.returns == "views" or not plan.compressed:
        return  # attention goes row by row, or through caches that mlx-lm batches itself
    for axes in (4, 5):
        if _ragged_batch_agrees(plan.model, axes):
            plan.mask_axes = axes
            return
    plan.no_batch = "this model's own attention does not take sequences of unequal length"


def _ragged_batch_agrees(model: Any, mask_axes: int) -> bool:
    """Whether two prompts of unequal length give the same logits together as alone."""
    prompts, more = [[1, 2, 3, 1], [2]], [3, 1]

    def fresh() -> list[Any]:
        return _caches(model, lambda _: Recorder(views=False, mask_axes=mask_axes))

    alone = []
    for tokens, token in zip(prompts, more, strict=True):
        caches = fresh()
        mx.eval(model(mx.array([tokens]), cache=caches))
        alone.append(model(mx.array([[token]]), cache=caches)[:, -1])
    lengths = [len(tokens) for tokens in prompts]
    width = max(lengths)
    padding = [width - n for n in lengths]
    padded = [tokens + [0] * n for tokens, n in zip(prompts, padding, strict=True)]
    try:
        rows = [fresh() for _ in prompts]
        batch = [same[0].merge(list(same)) for same in zip(*rows, strict=True)]
        for cache in batch:
            cache.prepare(lengths=lengths, right_padding=padding)
        mx.eval(model(mx.array(padded), cache=batch))
        for cache in batch:
            cache.finalize()
        together = model(mx.array(more)[:, None], cache=batch)[:, -1]
        if together.shape != (len(prompts), alone[0].shape[-1]):
            return False
        wanted = mx.concatenate(alone).astype(mx.float32)
        off = mx.abs(together.astype(mx.float32) - wanted).max()
        return bool((off <= _BATCH_TOLERANCE * mx.abs(wanted).max()).item())
    except _FOREIGN:
        return False
