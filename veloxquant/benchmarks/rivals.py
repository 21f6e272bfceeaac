"""What our caches are measured against: mlx-lm's own caches, and eviction by lot."""

from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx

from veloxquant.cache.exact import ExactRows
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.cache.selection import select_rows
from veloxquant.quantizers.sizes import LayerShape


class RandomRows(ExactRows):
    """Exact rows of which random ones are given up; the first and the newest stay.

    With `when` "prompt" a prompt over the budget is cut once, at the first single token after it,
    as snapkv does; with "always" the budget holds after every step, as in streaming_llm.
    """

    def __init__(
        self,
        shape: LayerShape,
        budget: int,
        n_sink: int,
        n_recent: int,
        when: Literal["prompt", "always"],
        seed: int,
    ) -> None:
        super().__init__(shape, "random")
        self.budget, self.n_sink, self.n_recent, self.when = budget, n_sink, n_recent, when
        self._key = mx.random.key(seed)
        self._in_prompt = False
        self._due = False

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append rows, and watch for the end of the prompt."""
        super().write(keys, values)
        n = keys.shape[2]
        self._due = self.when == "always" or (n == 1 and self._in_prompt)
        self._in_prompt = n > 1

    def settle(self) -> None:
        """Give up random rows beyond the budget."""
        surplus = self.rows - self.budget
        if not self._due or surplus <= 0:
            return
        self._due = False
        self._key, now = mx.random.split(self._key)
        batch, heads, _, _ = self._known_shape()
        lot = mx.random.uniform(shape=(batch, heads, self.rows), key=now)
        keep = select_rows(lot, self.budget, self.n_sink, self.n_recent)
        for store in (self.key_rows, self.value_rows):
            store.take(keep)
        self.evicted += surplus
        self._unevaluated = list(self.arrays())


def random_caches(
    plan: ModelPlan, budget: int, n_sink: int, n_recent: int, when: Literal["prompt", "always"]
) -> list[Any]:
    """One `RandomRows` a layer, each with lots of its own."""
    caches: list[Any] = []
    for layer, shape in enumerate(plan.shapes()):
        cache = RandomRows(shape, budget, n_sink, n_recent, when, seed=layer)
        cache.returns = "views"
        caches.append(cache)
    return caches


def stock_quantized(plan: ModelPlan, bits: int, group: int) -> tuple[list[Any], Callable[[], None]]:
    """mlx-lm's quantized caches, as its generator uses them with `quantized_kv_start=0`.

    Returns:
        The caches, a list that changes in place, and what to call after each step: the first chunk
        of a prompt is read exactly and quantized afterwards.
    """
    from mlx_lm.generate import maybe_quantize_kv_cache

    caches = native_caches(plan.model)

    def after_step() -> None:
        maybe_quantize_kv_cache(caches, quantized_kv_start=0, kv_group_size=group, kv_bits=bits)

    return caches, after_step


def held_bytes(cache: Any) -> int:
    """Bytes of every array that a cache of ours or of mlx-lm holds, floats counted as 16 bits.

    The benchmarks run in fp32, as serving on a CPU does; a GPU would hold 16 bits.
    """
    if hasattr(cache, "arrays"):
        cache.commit()
        arrays = list(cache.arrays())
    else:
        arrays = []
        for side in (cache.keys, cache.values):
            arrays.extend(side if isinstance(side, list | tuple) else [side])
    return sum(2 * a.size if mx.issubdtype(a.dtype, mx.floating) else a.nbytes for a in arrays)
