"""Which layers of a model can be compressed, and how: found out by running two tokens through it.

No list of architectures: the model makes its own caches, plain attention caches are replaced by
recorders that hand out views, and a forward pass shows shapes, query heads and whether the model's
attention reaches the hook. A model that takes arrays apart itself fails loudly on a view; it gets
arrays instead, decoded for the call and not kept.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from veloxquant.cache.hook import attach
from veloxquant.cache.view import CacheView
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

PROBE_TOKENS = 2


class Recorder:
    """A plain cache that remembers what it was given and who asked for attention."""

    def __init__(self, *, views: bool) -> None:
        self.views = views
        self.offset = 0
        self.rows: tuple[mx.array, mx.array] | None = None
        self.n_q_heads: int | None = None
        self.array_mask = False
        self.window: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append and return views or arrays."""
        if self.rows is None:
            self.rows = (keys, values)
        else:
            self.rows = tuple(
                mx.concatenate([old, new], axis=2)
                for old, new in zip(self.rows, (keys, values), strict=True)
            )  # type: ignore[assignment]
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What was appended so far."""
        assert self.rows is not None
        keys, values = self.rows
        if not self.views:
            return keys, values
        return (
            CacheView(self, keys.shape, keys.dtype, is_key=True, own=True),
            CacheView(self, values.shape, values.dtype, is_key=False, own=True),
        )

    def attend(
        self,
        queries: mx.array,
        view: CacheView,
        scale: float,
        mask: Any,
        sinks: Any,
        *,
        owner: bool,
    ) -> mx.array:
        """Exact attention, noting the number of query heads."""
        del view, owner
        assert self.rows is not None
        self.n_q_heads = queries.shape[1]
        keys, values = self.rows
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """The mask of a plain cache; notes whether the model wants an array."""
        self.array_mask |= return_array
        self.window = window_size or self.window
        if N == 1 and window_size is None:
            return None
        if not return_array and window_size is None:
            return "causal"
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        columns = mx.arange(self.offset + N)[None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)

    @property
    def state(self) -> list[mx.array]:
        """The rows."""
        return list(self.rows or ())

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def is_trimmable(self) -> bool:
        """Not used by a probe."""
        return False


@dataclass
class LayerReport:
    """What happens to one cache entry: `path` is its place in the model's list."""

    path: tuple[int, ...]
    kind: Literal["compressed", "native"]
    reason: str
    shape: LayerShape | None = None


@dataclass
class ModelPlan:
    """The result of a probe; `new_caches` in `cache/builder.py` builds from it.

    `returns` says whether attention comes through the hook ("views") or the caches hand out arrays
    decoded for the call. `warnings` are sentences for people.
    """

    model: Any
    layers: list[LayerReport]
    returns: Literal["views", "arrays"]
    array_masks: bool = False
    window: int | None = None
    warnings: list[str] = field(default_factory=list)
    ropes: dict[tuple[int, ...], Any] = field(default_factory=dict)

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
        """Whether every entry can join a batch."""
        return all(hasattr(entry, "merge") for entry in native_caches(self.model))

    def shapes(self) -> list[LayerShape]:
        """Shapes of the compressed entries."""
        return [layer.shape for layer in self.layers if layer.shape and layer.kind == "compressed"]


def native_caches(model: Any) -> list[Any]:
    """The caches that the model itself would use, newly made."""
    from mlx_lm.models.cache import make_prompt_cache  # loads transformers: only when used

    return make_prompt_cache(model)


def replace_plain(entry: Any, path: tuple[int, ...], make: Any) -> Any:
    """`entry` with every plain attention cache in it replaced by `make(path)`, None to keep it."""
    from mlx_lm.models.cache import CacheList, KVCache

    if type(entry) is KVCache:
        made = make(path)
        return entry if made is None else made
    if isinstance(entry, CacheList):
        inner = [replace_plain(c, (*path, i), make) for i, c in enumerate(entry.caches)]
        return CacheList(*inner)
    return entry


def _run(model: Any, *, views: bool) -> dict[tuple[int, ...], Recorder]:
    recorders: dict[tuple[int, ...], Recorder] = {}

    def make(path: tuple[int, ...]) -> Recorder:
        recorders[path] = Recorder(views=views)
        return recorders[path]

    caches = [replace_plain(c, (i,), make) for i, c in enumerate(native_caches(model))]
    tokens = mx.array([[1] * PROBE_TOKENS])
    mx.eval(model(tokens, cache=caches))
    mx.eval(model(tokens[:, :1], cache=caches))
    return recorders


def probe(model: Any) -> ModelPlan:
    """Run two tokens and one more through the model and report on every cache entry.

    Raises:
        QuantizerConfigError: when the model fails with plain arrays too.
    """
    attach()
    warnings: list[str] = []
    returns: Literal["views", "arrays"] = "views"
    try:
        recorders = _run(model, views=True)
        missed = [p for p, r in recorders.items() if r.rows is not None and r.n_q_heads is None]
        if missed:
            raise TypeError(f"attention of cache entry {missed[0]} does not reach the hook")
    except (TypeError, AttributeError, ValueError) as error:
        returns = "arrays"
        warnings.append(
            f"This model computes attention itself ({_first_line(error)}), so packed caches are "
            f"unpacked for each call: memory is saved, speed is not, and scores use keys only."
        )
        try:
            recorders = _run(model, views=False)
        except (TypeError, AttributeError, ValueError) as second:
            raise QuantizerConfigError(
                f"the model cannot run with plain caches: {_first_line(second)}"
            ) from second
    args = getattr(model, "args", None) or getattr(model, "config", None)
    latent = returns == "arrays" and getattr(args, "kv_lora_rank", None) is not None
    plan = ModelPlan(model, [], returns, warnings=warnings)
    for i, entry in enumerate(native_caches(model)):
        _report(entry, (i,), recorders, plan, latent=latent)
    plan.array_masks = any(r.array_mask for r in recorders.values())
    plan.window = next((r.window for r in recorders.values() if r.window), None)
    plan.ropes = _find_ropes(model)
    return plan


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _report(
    entry: Any,
    path: tuple[int, ...],
    recorders: dict[tuple[int, ...], Recorder],
    plan: ModelPlan,
    *,
    latent: bool,
) -> None:
    inner = getattr(entry, "caches", None)
    if inner is not None:
        for i, cache in enumerate(inner):
            _report(cache, (*path, i), recorders, plan, latent=latent)
        return
    seen = recorders.get(path)
    if seen is None:
        plan.layers.append(LayerReport(path, "native", f"{type(entry).__name__} is bounded"))
        return
    if seen.rows is None:
        plan.layers.append(LayerReport(path, "native", "unused by the model"))
        return
    keys, values = seen.rows
    heads, k_dim, v_dim = keys.shape[1], keys.shape[3], values.shape[3]
    shape = LayerShape(seen.n_q_heads or heads, heads, k_dim, v_dim, keys.dtype.size)
    if latent:
        report = LayerReport(path, "native", "a latent shared by all heads, small already", shape)
    else:
        report = LayerReport(path, "compressed", "full attention", shape)
    plan.layers.append(report)


def _find_ropes(model: Any) -> dict[tuple[int, ...], Any]:
    """Position encodings by cache entry, where layers and entries correspond one to one."""
    ropes: dict[tuple[int, ...], Any] = {}
    layers = getattr(model, "layers", None) or []
    for i, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", None)
        rope = getattr(attention, "rope", None)
        if rope is not None:
            ropes[(i,)] = rope
    return ropes
