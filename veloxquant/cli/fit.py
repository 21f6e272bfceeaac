"""`vq fit`: what fits, method by method."""

import argparse
from dataclasses import asdict

from veloxquant.cli import exit_codes
from veloxquant.cli.models import pick, room_now
from veloxquant.cli.output import CliError, envelope, gib, result, table, talk
from veloxquant.planning.fit import FitRow, best_start, fit_table
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
    """Print the method table for one model at one context."""
    model = pick(args.model)
    shape, room = shape_of(model), room_now(args.ram)
    context = args.context or min(8192, shape.native_context)
    warnings = list(shape.notes)
    if context > shape.native_context:
        warnings.append(
            f"{context:,} tokens are more than the {shape.native_context:,} the model was made for"
        )
    rows = fit_table(shape, context, args.batch, room.nbytes)
    best = best_start(rows)
    if args.json:
        data = {
            "model": model.name,
            "context": context,
            "batch": args.batch,
            "room": asdict(room) | {"nbytes": room.nbytes},
            "weights_bytes": shape.resident_weights,
            "native_context": shape.native_context,
            "layers": shape.n_layers,
            "layers_compressed": shape.n_compressed,
            "proposed": best.method if best else None,
            "methods": [row.as_data() for row in rows],
        }
        result(envelope(data, warnings))
    else:
        result(f"{model.name}   context {context:,}   batch {args.batch}   {room.describe()}")
        result(f"weights {gib(shape.resident_weights)} in memory, native context "
               f"{shape.native_context:,}, {shape.n_compressed} of {shape.n_layers} layers "
               f"compressed\n")  # fmt: skip
        result(_table(rows, best))
        _left_out(rows, everything=args.all)
        for warning in warnings:
            talk(f"note: {warning}")
    if best is None:
        talk(_nothing_fits(rows, room))
        return exit_codes.DOES_NOT_FIT
    return exit_codes.OK


def _table(rows: list[FitRow], best: FitRow | None) -> str:
    head = ["METHOD", "BITS", "KV", "IN USE", "PEAK", "MAX CTX", "LIMITED BY", "FITS", "NOTE"]
    body = [
        [
            row.method + (" *" if best and row.method == best.method else ""),
            "-" if row.bits is None else f"{row.bits:.2f}",
            gib(row.kv_bytes),
            gib(row.resident_bytes),
            gib(row.peak_bytes),
            f"{row.max_context:,}",
            row.limit or "",
            "yes" if row.fits else "no",
            row.note,
        ]
        for row in rows
        if row.max_context is not None
    ]
    text = table(head, body, right=(1, 2, 3, 4, 5))
    return text + "\nkv: exact bytes; in use and peak: estimates; * proposed"


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
