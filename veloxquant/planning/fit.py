"""What fits: bytes, prefill peak and longest context of every method for one model.

All bytes of compressed layers come from the method table (`cache/table.py`), which the caches
follow too; there is no second table of ratios. A context is a prompt with its answer: bytes are the
most on the way to it, with an answer of `answer` tokens at its end, which methods that compress a
prompt once keep whole.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from veloxquant.cache.layouts.in_model import size_in_model
from veloxquant.cache.plans import PREFILL_CHUNK
from veloxquant.cache.table import TABLE, MethodRow, row_of
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.config.settings import SETTINGS
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.planning.method_settings import SettingsError, config_of
from veloxquant.planning.model_shape import ModelShape
from veloxquant.quantizers.sizes import Held, LayerShape

Limit = Literal["weights", "kv", "prompt phase", "native context"]
PROGRAM_BYTES = 192 << 20
"""Python, MLX, tokenizer and HTTP of a worker without a model (170 to 190 MiB measured)."""
LOAD_PIECE = 64 << 20
"""Weights that the worker reads at a time (`worker/load.py`)."""
LEAST_TOKENS = 16
ANSWER = int(SETTINGS["server.max_tokens"].default)
"""Tokens of an answer where nobody says how long it may be."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes up to one length: program + weights + kv when answering, `peak` at worst.

    `kv` is the most on the way, `kv_end` what is held at exactly that length; formats that wait for
    whole blocks hold more just before one. `reading` is what the weights need on top while they
    are read and widened.
    """

    weights: int
    kv: int
    kv_end: int
    native: int
    work: int
    program: int
    prompt_kv: int
    reading: int = 0

    @property
    def resident(self) -> int:
        """Bytes while answers are written."""
        return self.program + self.weights + self.kv + self.native

    @property
    def peak(self) -> int:
        """Most bytes: while the weights are read, or while the prompt is."""
        return max(self.loading, self.resident, self.prompt)

    @property
    def prompt(self) -> int:
        """Most bytes while the prompt is read."""
        return self.resident - self.kv + self.prompt_kv + self.work

    @property
    def loading(self) -> int:
        """Most bytes while the weights are read."""
        return self.program + self.weights + self.reading


@dataclass(frozen=True, slots=True)
class FitRow:
    """One method for one model. `why` says why it is left out; bytes are None then.

    `kv_bytes` are the most on the way to the context, `kv_end_bytes` those at its end,
    `kv_reading_bytes` the most while a prompt of that length is read, which methods that choose by
    the whole of it hold until then; `rows` are the tokens kept at the end. `known` says how a
    number is known: kv bytes are exact, the peak is an estimate, quality and speed are unknown
    (`-`) until measured.
    """

    method: str
    kind: str
    ready: bool
    why: str = ""
    note: str = ""
    bits: float | None = None
    kv_bytes: int | None = None
    kv_end_bytes: int | None = None
    kv_reading_bytes: int | None = None
    rows: int | None = None
    native_bytes: int | None = None
    ratio: float | None = None
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    max_context: int | None = None
    limit: Limit | None = None
    fits: bool = False
    known: str = "-"

    def as_data(self) -> dict[str, Any]:
        """The row for JSON."""
        return asdict(self)


class Sizer:
    """Bytes of one method and model at any length.

    Args:
        model: its shape.
        config: method and settings; checked once, here.
        answer: tokens of the longest answer that is planned for.

    Raises:
        QuantizerConfigError: when the configuration cannot work or the method is planned.
    """

    def __init__(self, model: ModelShape, config: KVCacheConfig, answer: int = ANSWER) -> None:
        self.model = model
        self.config = config
        self.answer = answer
        self.row = row_of(config.method)
        self.row.check(config)
        if self.row.held is None:
            self.row.load()
            raise QuantizerConfigError(f"method {config.method!r} gives no size")
        n_layers = sum(count for _, count in model.layers)
        self._held = size_in_model(config, n_layers) or self.row.held

    def held(self, shape: LayerShape, tokens: int) -> Held:
        """What one layer holds at the end of a context, the answer in it."""
        return self._held(self.config, shape, tokens, min(self.answer, tokens - 1))

    def rows(self, tokens: int) -> int:
        """Tokens that the first compressed layer keeps of a context, the answer in it."""
        for shape, _ in self.model.layers:
            return self.held(shape, tokens).rows
        return tokens

    def need(self, tokens: int, batch: int = 1) -> Need:
        """Bytes for `batch` conversations of up to `tokens` tokens each, answers in them."""
        model, kv, end, prompt, work = self.model, 0, 0, 0, 0
        itemsize = 4 if model.backend == "cpu" else 2
        for shape, count in model.layers:
            held = self.held(shape, tokens)
            # The newest token is coded when the next one comes.
            newest = 0 if self.config.method == BASELINE else shape.full_bytes(1)
            kv += count * (held.most + newest)
            end += count * (held.nbytes + newest)
            # layers are read one after the other: their transient work is needed once
            prompt += count * max(held.most + newest, held.peak - held.work)
            work = max(work, held.work)
        rows = min(tokens, PREFILL_CHUNK)
        work += rows * (3 * model.intermediate + 4 * model.hidden) * itemsize
        work += model.vocabulary * 4
        return Need(
            weights=model.resident_weights,
            kv=batch * kv,
            kv_end=batch * end,
            native=batch * model.native_bytes(tokens),
            work=batch * work,
            program=PROGRAM_BYTES,
            prompt_kv=batch * prompt,
            reading=self._reading(),
        )

    def _reading(self) -> int:
        """Arrays as the file has them, next to their wide copies: a piece and the largest one."""
        model = self.model
        if model.resident_weights <= model.file_weights:
            return 0  # nothing is widened
        return min(model.file_weights, LOAD_PIECE + 2 * model.vocabulary * model.hidden)

    def max_context(self, room: int, batch: int = 1) -> tuple[int, Limit]:
        """Longest context that fits into `room` bytes, at most the native one, and its limit."""
        native = self.model.native_context
        least = self.need(min(LEAST_TOKENS, native), batch)
        if least.peak > room:
            return 0, "weights" if least.loading > room else _which(least, room)
        if self.need(native, batch).peak <= room:
            return native, "native context"
        lengths = range(min(LEAST_TOKENS, native), native)
        # Every part of a need grows with the length, so the search may halve.
        fitting = bisect_right(lengths, room, key=lambda tokens: self.need(tokens, batch).peak)
        longest = lengths[fitting - 1]
        return longest, _which(self.need(longest + 1, batch), room)


def _which(need: Need, room: int) -> Limit:
    return "kv" if need.resident > room else "prompt phase"


def fit_row(
    model: ModelShape,
    row: MethodRow,
    context: int,
    batch: int,
    room: int,
    *,
    options: dict[str, Any] | None = None,
    answer: int = ANSWER,
) -> FitRow:
    """One method for one model; a method or setting that cannot work is a row with a reason."""
    if not row.is_ready:
        return FitRow(row.name, row.kind, False, why="documented but not built yet")
    head_dim = next((shape.k_dim for shape, _ in model.layers), 128)
    try:
        sizer = Sizer(model, config_of(row.name, options or {}, head_dim), answer)
    except (QuantizerConfigError, SettingsError) as error:
        return FitRow(row.name, row.kind, True, why=str(error))
    if not model.layers and row.name != BASELINE:
        return FitRow(row.name, row.kind, True, why="no layer of this model can be compressed")
    need = sizer.need(context, batch)
    plain = batch * context * model.kv_bytes_per_token
    kept = sizer.rows(context)
    longest, limit = sizer.max_context(room, batch)
    values = plain // (4 if model.backend == "cpu" else 2)
    return FitRow(
        method=row.name,
        kind=row.kind,
        ready=True,
        note=f"keeps {kept:,} of {context:,} tokens" if kept < context else "",
        rows=kept,
        bits=round(8 * need.kv / values, 2) if values else None,
        kv_bytes=need.kv,
        kv_end_bytes=need.kv_end,
        kv_reading_bytes=need.prompt_kv,
        native_bytes=need.native,
        ratio=round(plain / need.kv, 2) if need.kv else None,
        resident_bytes=need.resident,
        peak_bytes=need.peak,
        max_context=longest,
        limit=limit,
        fits=context <= longest,
        known="exact bytes",
    )


def fit_table(
    model: ModelShape,
    context: int,
    batch: int,
    room: int,
    *,
    methods: Sequence[str] = (),
    options: Mapping[str, dict[str, Any]] | None = None,
    answer: int = ANSWER,
) -> list[FitRow]:
    """All methods for one model at `context` tokens and `batch` conversations, best first.

    Methods that fit come first; among them those that keep every token, by longest context, then by
    bytes. Those left out come last. `options` are settings by method, `answer` the tokens of an
    answer at the end of the context.
    """
    rows = [row_of(name) for name in methods] or list(TABLE.values())
    options = options or {}
    table = [
        fit_row(model, row, context, batch, room, options=options.get(row.name), answer=answer)
        for row in rows
    ]
    return sorted(table, key=_rank)


def _rank(row: FitRow) -> tuple[Any, ...]:
    out = row.max_context is None
    evicts = bool(row.note)
    return (
        out, not row.ready, not row.fits, evicts, -(row.max_context or 0), row.kv_bytes or 0
    )  # fmt: skip


def longest(table: Sequence[FitRow], preferred: str = BASELINE) -> FitRow | None:
    """The row to name in a list of models: the longest context with every token kept.

    Of equally long ones the preferred one, else the uncompressed one; None when nothing fits.
    """
    whole = [row for row in table if row.max_context and row.kind != "eviction"]
    most = max((row.max_context or 0 for row in whole), default=0)
    reach = {row.method: row for row in whole if row.max_context == most}
    for name in (preferred, BASELINE):
        if name in reach:
            return reach[name]
    return next(iter(reach.values()), None)


def best_start(table: Sequence[FitRow]) -> FitRow | None:
    """The method to propose, or None when nothing fits.

    Uncompressed while that fits, else the first that keeps every token, else the first of all.
    """
    fitting = [row for row in table if row.fits]
    plain = [row for row in fitting if row.method == BASELINE]
    whole = [row for row in fitting if not row.note]
    return next(iter(plain or whole or fitting), None)
