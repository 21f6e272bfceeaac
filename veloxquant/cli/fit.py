"""`vq fit`: what fits, method by method."""

import argparse
from dataclasses import asdict
from typing import Any

from veloxquant.cli import exit_codes
from veloxquant.cli.models import pick, room_now
from veloxquant.cli.output import CliError, envelope, gib, result, table, talk, usage_error
from veloxquant.cli.overrides import check_ready, parse_overrides
from veloxquant.cli.setting_words import setting_words
from veloxquant.config.settings import load_settings
from veloxquant.config.small_models import options_by_method
from veloxquant.planning.baseline import baseline_note
from veloxquant.planning.fit import FitRow, Need, Sizer, best_start, fit_table
from veloxquant.planning.method_settings import config_of, fields_of
from veloxquant.planning.model_shape import ModelShape, ShapeError, read_shape
from veloxquant.planning.models import LocalModel
from veloxquant.planning.room import Room


def shape_of(model: LocalModel) -> ModelShape:
    """Shape of a model that can run.

    Raises:
        CliError: when it cannot run or its sizes are unknown.
    """
    if not model.runnable:
        raise CliError(
            f"{model.name} cannot run: {model.why}.", "`vq models ls` shows what can.",
            exit_codes.UNSUPPORTED, "bad_model",
        )  # fmt: skip
    try:
        return read_shape(model.path)
    except ShapeError as error:
        raise CliError(
            f"The sizes of {model.name} are unknown: {error}.", "", exit_codes.UNSUPPORTED
        ) from error


def run(args: argparse.Namespace) -> int:
    """Print the method table for one model at one context, or one method in detail."""
    chosen = _options(args)
    model = pick(args.model)
    shape, room = shape_of(model), room_now(args.ram)
    context = args.context or min(8192, shape.native_context)
    warnings = list(shape.notes)
    beyond = ""
    if context > shape.native_context:
        beyond = f"{model.name} was made for {shape.native_context:,} tokens; asked {context:,}."
    options = options_by_method(model.params)
    options |= {method: options.get(method, {}) | own for method, own in chosen.items()}
    answer = args.answer or load_settings().value("server.max_tokens")
    rows = fit_table(shape, context, args.batch, room.nbytes, methods=list(chosen),
                     options=options, answer=answer)  # fmt: skip
    best = best_start(rows)
    if args.json:
        data = {
            "model": model.name,
            "context": context,
            "batch": args.batch,
            "answer": min(answer, context),
            "room": asdict(room) | {"nbytes": room.nbytes},
            "weights_bytes": shape.resident_weights,
            "native_context": shape.native_context,
            "layers": shape.n_layers,
            "layers_compressed": shape.n_compressed,
            "proposed": best.method if best else None,
            "methods": [row.as_data() for row in rows],
        }
        result(envelope(data, [*warnings, beyond] if beyond else warnings))
    else:
        result(f"{model.name}   context {context:,}, an answer of {min(answer, context):,} in it"
               f"   batch {args.batch}   {room.describe()}")  # fmt: skip
        result(f"weights {gib(shape.resident_weights)} in memory, native context "
               f"{shape.native_context:,}, {shape.n_compressed} of {shape.n_layers} layers "
               f"compressed\n")  # fmt: skip
        if any(row.max_context is not None for row in rows):
            result(_table(rows, None if args.method else best, options, shape, context, room))
        _left_out(rows, everything=args.all)
        if args.method and rows[0].bits is not None:
            own = options.get(args.method, {})
            need = _sizer(args.method, own, shape, answer).need(context, args.batch)
            _detail(args.method, own, need, context)
        for warning in warnings:
            talk(f"note: {warning}")
    if best is None:
        talk(beyond or _nothing_fits(rows, room))
        return exit_codes.DOES_NOT_FIT
    return exit_codes.OK


def _options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings by method, empty without --method; read as `vq up` reads them."""
    if args.method is None:
        if args.overrides or args.bits is not None:
            usage_error("--set and --bits are about one method.", "Add --method NAME.")
        return {}
    options = parse_overrides(args.overrides, args.method, args.bits)
    check_ready(args.method)
    return {args.method: options}


def _sizer(method: str, options: dict[str, Any], shape: ModelShape, answer: int) -> Sizer:
    head_dim = next((layer.k_dim for layer, _ in shape.layers), 128)
    return Sizer(shape, config_of(method, options, head_dim), answer)


def _detail(method: str, options: dict[str, Any], need: Need, context: int) -> None:
    """Settings of one method and what its memory is made of."""
    settings = {name: options.get(name, field.default) for name, field in fields_of(method).items()}
    told = ", ".join(f"{name}={value}" for name, value in settings.items())
    parts = [("program", need.program), ("weights", need.weights), ("kv", need.kv),
             ("other layers", need.native)]  # fmt: skip
    result(f"\nsettings  {told or 'none'}")
    result(f"in use    {' + '.join(f'{name} {gib(n)}' for name, n in parts if n)}")
    if need.kv_end < 0.99 * need.kv:
        result(f"kv        {gib(need.kv_end)} at exactly {context:,} tokens, before it up to "
               f"{gib(need.kv)} while tokens wait for a whole block")  # fmt: skip
    if need.prompt_kv > need.kv:
        result(f"reading   kv {gib(need.prompt_kv)} while a prompt of {context:,} tokens is read: "
               f"the method chooses among all of it")  # fmt: skip
    result(f"peak      weights being read {gib(need.loading)}; prompt being read "
           f"{gib(need.prompt)}")  # fmt: skip


def _table(
    rows: list[FitRow],
    best: FitRow | None,
    options: dict[str, dict[str, Any]],
    shape: ModelShape,
    context: int,
    room: Room,
) -> str:
    head = [
        "METHOD",
        "SETTING",
        "BITS",
        "KV",
        "READING",
        "IN USE",
        "PEAK",
        "MAX CTX",
        "LIMITED BY",
        "FITS",
        "NOTE",
    ]
    body = [
        [
            row.method + (" *" if best and row.method == best.method else ""),
            setting_words(row.method, options.get(row.method, {})),
            "-" if row.bits is None else f"{row.bits:.1f}",
            gib(row.kv_bytes),
            gib(row.kv_reading_bytes),
            gib(row.resident_bytes),
            gib(row.peak_bytes),
            f"{row.max_context:,}",
            row.limit or "",
            "yes"
            if row.fits
            else "beyond native"
            if context > shape.native_context and (row.peak_bytes or 0) <= room.nbytes
            else "no",
            row.note or baseline_note(row.method, shape.backend),
        ]
        for row in rows
        if row.max_context is not None
    ]
    legend = (
        "bits: per value, exact tokens included; kv: exact, the most while answers are written; "
        "reading: kv at most while a prompt is read; in use (between prompts) and peak: estimates"
    )
    text = table(head, body, right=(1, 2, 3, 4, 5, 6, 7))
    star = "\n* proposed for this length; `vq up MODEL --method auto` starts it" if best else ""
    return f"{text}\n{legend}{star}"


def _left_out(rows: list[FitRow], *, everything: bool) -> None:
    out = [row for row in rows if row.max_context is None]
    planned = [row for row in out if not row.ready]
    for row in out:
        if everything or row.ready:
            result(f"- {row.method}: {row.why}")
    if planned and not everything:
        result(f"{len(planned)} more methods are documented but not built yet (--all lists them)")


def _nothing_fits(rows: list[FitRow], room: Room) -> str:
    known = [row for row in rows if row.max_context is not None]
    longest = max(known, key=lambda row: row.max_context or 0, default=None)
    if longest and longest.max_context:
        return (
            f"Nothing fits at this length; {longest.method} fits up to "
            f"{longest.max_context:,} tokens."
        )
    return f"The weights alone are too large: {room.describe()}."
