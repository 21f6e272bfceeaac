"""`vq models`: list, show, fetch the demo model."""

import argparse
import signal
import time
from dataclasses import asdict
from typing import Any

from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError, count, envelope, gib, result, styled, table, talk
from veloxquant.config.settings import load_settings
from veloxquant.config.small_models import options_by_method
from veloxquant.planning.fit import fit_table, longest
from veloxquant.planning.model_shape import ShapeError, read_shape
from veloxquant.planning.models import (
    LocalModel,
    ModelNotFoundError,
    Scan,
    find_model,
    model_roots,
    printable,
    scan_models,
)
from veloxquant.planning.room import Room, assumed_room, measure_room


def scan() -> Scan:
    """Models in all folders that the settings name."""
    return scan_models(model_roots(load_settings().value("models.folders")))


def pick(name: str) -> LocalModel:
    """The model that the user means.

    Raises:
        CliError: when there is none.
    """
    try:
        return find_model(name, scan().models)
    except ModelNotFoundError as error:
        raise CliError(
            f"There is {error.args[0]}.",
            "`vq models ls` lists them; `vq models demo` fetches a small one.",
            exit_codes.NOT_FOUND,
            "model_missing",
        ) from error


def room_now(ram: int | None = None) -> Room:
    """Room for a model: as given, else measured with the settings' reserve."""
    if ram is not None:
        return assumed_room(ram)
    from veloxquant.config.settings import load_settings

    return measure_room(keep_free=load_settings().value("memory.keep_free"))


def reach(model: LocalModel, room: Room) -> tuple[int | None, str]:
    """Longest context that fits, with the method; None when unknown, 0 when nothing fits."""
    if not model.runnable:
        return None, ""
    try:
        shape = read_shape(model.path)
    except ShapeError:
        return None, ""
    settings = load_settings()
    table = fit_table(
        shape, shape.native_context, 1, room.nbytes,
        options=options_by_method(model.params), answer=settings.value("server.max_tokens"),
    )  # fmt: skip
    row = longest(table, settings.value("server.method"))
    return (row.max_context, row.method) if row else (0, "")


def as_data(model: LocalModel, *, paths: bool) -> dict[str, Any]:
    """A model for JSON; its folder only when asked for."""
    data = asdict(model)
    del data["path"]
    return data | ({"path": printable(str(model.path))} if paths else {})


def age(seconds: float) -> str:
    """Time since something happened, roughly."""
    for size, letter in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {letter}"
    return "now"


def ls(args: argparse.Namespace) -> int:
    """List the models on this machine."""
    found = scan()
    room = room_now()
    wanted = not args.quiet or args.sort == "fit"
    nothing: tuple[int | None, str] = (None, "")
    fits = {model.path: reach(model, room) if wanted else nothing for model in found.models}
    order = _ORDER.get(args.sort) or (lambda model: -(fits[model.path][0] or 0))
    models = sorted(sorted(found.models, key=_ORDER["name"]), key=order)
    if args.json:
        data = {
            "models": [
                as_data(model, paths=args.paths)
                | {"fits_tokens": fits[model.path][0], "fits_method": fits[model.path][1]}
                for model in models
            ],
            "looked_in": [root.origin for root in found.looked_in],
        }
        result(envelope(data, found.warnings))
        return exit_codes.OK
    for warning in found.warnings:
        talk(f"{styled('warning:', 'yellow')} {warning}")
    if args.quiet:
        for model in models:
            result(model.name)
        return exit_codes.OK
    if not models:
        looked = ", ".join(_ORIGINS[root.origin] for root in found.looked_in)
        talk(f"No model here yet. Looked in: {looked}.")
        talk("`vq models demo` fetches a small one to try everything with.")
        return exit_codes.OK
    now = time.time()
    head = ["NAME", "PARAMS", "QUANT", "DISK", "FITS UP TO", "CHANGED", "RUNS"]
    rows = [
        [
            model.name,
            count(model.params),
            model.quant,
            gib(model.disk_bytes),
            _reach_text(*fits[model.path]),
            age(now - model.modified),
            "yes" if model.runnable else f"no: {model.why}",
        ]
        for model in models
    ]
    if args.paths:
        head.append("FOLDER")
        rows = [[*row, printable(str(model.path))] for row, model in zip(rows, models, strict=True)]
    result(table(head, rows, right=(1, 3)))
    return exit_codes.OK


def _reach_text(tokens: int | None, method: str) -> str:
    if tokens is None:
        return "-"
    return f"{tokens:,} {method}" if tokens else "too big here"


_ORDER: dict[str, Any] = {
    "name": lambda model: model.name.lower(),
    "size": lambda model: -model.disk_bytes,
    "used": lambda model: -model.modified,
}
_ORIGINS = {
    "own": "the program's own folder",
    "hub": "the Hugging Face cache",
    "folder": "an added folder",
}


def show(args: argparse.Namespace) -> int:
    """Everything known about one model."""
    model = pick(args.model)
    facts: dict[str, Any] = {}
    warnings: list[str] = []
    if model.runnable:
        try:
            shape = read_shape(model.path)
        except ShapeError as error:
            warnings.append(f"sizes are unknown: {error}")
        else:
            facts = {
                "layers": shape.n_layers,
                "layers_compressed": shape.n_compressed,
                "hidden_size": shape.hidden,
                "native_context": shape.native_context,
                "weights_resident_bytes": shape.resident_weights,
                "kv_bytes_per_token_uncompressed": shape.kv_bytes_per_token,
                "notes": list(shape.notes),
            }
    data = as_data(model, paths=True) | facts
    if args.json:
        result(envelope(data, warnings))
        return exit_codes.OK
    for key, value in data.items():
        if key.endswith("_bytes") or "_bytes_" in key:
            value = f"{value:,} bytes ({gib(value)})"
        elif key == "params":
            value = f"{value:,} ({count(value)})" if value else "-"
        elif key == "modified":
            value = time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
        elif isinstance(value, list):
            value = "; ".join(value) or "-"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        result(f"{key.replace('_', ' '):32} {value if value != '' else '-'}")
    for warning in warnings:
        talk(f"{styled('warning:', 'yellow')} {warning}")
    return exit_codes.OK


def demo(args: argparse.Namespace) -> int:
    """Fetch the demo model, unless it is there."""
    from veloxquant.integration.demo_model import NAME, DemoModelError, install

    def report(text: str) -> None:
        if not args.quiet:
            talk(text)

    # so that a panel that cancels leaves no half-made files behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        folder = install(report)
    except DemoModelError as error:
        code = exit_codes.NETWORK if error.kind == "network" else exit_codes.FAILED
        raise CliError(str(error), error.hint, code, error.kind) from error
    if args.json:
        result(envelope({"name": NAME, "path": printable(str(folder))}))
    elif not args.quiet:
        result(NAME)
    return exit_codes.OK
