"""Run a text through a model and keep samples of what every compressed layer saw.

Keys, values and queries are taken where caches take them, through the attention hook. Logits are
never computed: only what was recorded is evaluated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache.context import LayerSample
from veloxquant.cache.probe import ModelPlan, Path, native_caches, replace_plain
from veloxquant.cache.recorder import Recorder
from veloxquant.cache.view import AttentionCall
from veloxquant.core.exceptions import QuantizerConfigError

WINDOW = 1024
"""Tokens of one piece of text; positions start again with each."""
LEAST_TOKENS = 64
_STEP = 256


def silent(done: int, total: int) -> None:
    """Report progress to nobody."""
    del done, total


class Sampler(Recorder):
    """An exact cache that remembers the queries of the layer's own attention."""

    def __init__(self, *, views: bool) -> None:
        super().__init__(views=views)
        self.asked: list[mx.array] = []

    def attend(self, call: AttentionCall) -> mx.array:
        """Exact attention; queries of layers that borrow these keys are not kept."""
        if call.owner:
            self.asked.append(call.queries)
        return super().attend(call)


class Samples(Sequence[LayerSample]):
    """Samples of all layers; each is turned into fp32 when it is asked for."""

    def __init__(self, plan: ModelPlan, parts: list[list[dict[str, mx.array | None]]]) -> None:
        self._layers = [layer for layer in plan.layers if layer.kind == "compressed"]
        self._ropes, self._parts = plan.ropes, parts

    def __len__(self) -> int:
        return len(self._layers)

    def _joined(self, index: int, name: str, axis: int) -> mx.array | None:
        pieces = [p for part in self._parts[index] if (p := part[name]) is not None]
        if len(pieces) < len(self._parts[index]):
            return None
        return mx.concatenate(pieces, axis=axis)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        layer = self._layers[index]
        keys, values, queries, positions = (
            self._joined(index, name, axis)
            for name, axis in (("keys", 1), ("values", 1), ("queries", 1), ("positions", 0))
        )
        assert layer.shape is not None
        assert keys is not None
        assert values is not None
        assert positions is not None
        return LayerSample(
            index, len(self), layer.shape, keys.astype(mx.float32), values.astype(mx.float32),
            None if queries is None else queries.astype(mx.float32), positions,
            self._ropes.get(layer.path),
        )  # fmt: skip


def collect(
    plan: ModelPlan,
    tokens: Sequence[int],
    rows: int = 2048,
    *,
    window: int = WINDOW,
    seed: int = 42,
    report: Callable[[int, int], None] = silent,
) -> Samples:
    """Sample every compressed layer of a probed model.

    Args:
        plan: what the probe found; the model in it is run.
        tokens: the text, cut into pieces of `window` tokens.
        rows: tokens kept of each layer, spread over all pieces; all when there are fewer.
        window: tokens that attend to each other.
        seed: of the choice of tokens.
        report: gets tokens done and tokens in all.

    Raises:
        QuantizerConfigError: when no layer can be compressed, or the text is too short.
    """
    if len(tokens) < LEAST_TOKENS:
        raise QuantizerConfigError(
            f"the text has {len(tokens)} tokens; give at least {LEAST_TOKENS}"
        )
    pieces = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    pieces = [piece for piece in pieces if len(piece) >= min(LEAST_TOKENS, window)] or [tokens]
    return sample_pieces(plan, pieces, rows, seed=seed, report=report)


def sample_pieces(
    plan: ModelPlan,
    pieces: Sequence[Sequence[int]],
    rows: int,
    *,
    seed: int = 42,
    report: Callable[[int, int], None] = silent,
) -> Samples:
    """Sample every compressed layer while the model reads texts that know nothing of each other.

    Args:
        plan: what the probe found; the model in it is run.
        pieces: tokens of each text, at least one.
        rows: tokens kept of each layer, spread over all pieces by their length.
        seed: of the choice of tokens.
        report: gets tokens done and tokens in all.

    Raises:
        QuantizerConfigError: when no layer can be compressed, or there is no text.
    """
    if plan.compressed == 0:
        raise QuantizerConfigError(
            "no layer of this model can be compressed, so there is nothing to calibrate"
        )
    pieces = [piece for piece in pieces if len(piece)]
    if not pieces:
        raise QuantizerConfigError("there is no text to read; give one with tokens")
    total = sum(map(len, pieces))
    rng = np.random.default_rng(seed)
    parts: list[list[dict[str, mx.array | None]]] = [[] for _ in range(plan.compressed)]
    done = 0
    for piece in pieces:
        share = min(len(piece), -(-rows * len(piece) // total))
        chosen = np.sort(rng.choice(len(piece), share, replace=False))
        for part, taken in zip(parts, _run(plan, piece, chosen.astype(np.int32)), strict=True):
            part.append(taken)
        done += len(piece)
        report(done, total)
    return Samples(plan, parts)


def _run(
    plan: ModelPlan, piece: Sequence[int], chosen: np.ndarray
) -> Iterator[dict[str, mx.array | None]]:
    """The chosen tokens of one piece, layer by layer."""
    wanted = [layer.path for layer in plan.layers if layer.kind == "compressed"]
    samplers: dict[Path, Sampler] = {}

    def make(path: Path) -> Sampler | None:
        if path not in wanted:
            return None
        samplers[path] = Sampler(views=plan.returns == "views")
        return samplers[path]

    caches = [replace_plain(c, (i,), make) for i, c in enumerate(native_caches(plan.model))]
    for start in range(0, len(piece), _STEP):
        plan.model(mx.array([list(piece[start : start + _STEP])]), cache=caches)
        mx.eval([s.rows for s in samplers.values()], [s.asked for s in samplers.values()])
    at = mx.array(chosen)
    taken: list[dict[str, mx.array | None]] = []
    for path in wanted:
        sampler = samplers[path]
        assert sampler.rows is not None
        keys, values = (mx.take(x[0], at, axis=1) for x in sampler.rows)
        queries = None
        if sampler.asked:
            queries = mx.take(mx.concatenate(sampler.asked, axis=2)[0], at, axis=1)
        taken.append({"keys": keys, "values": values, "queries": queries, "positions": at})
    mx.eval([array for part in taken for array in part.values() if array is not None])
    yield from taken
