"""`vq up`: choose, check, start, wait."""

import argparse
from dataclasses import dataclass
from typing import Any

from veloxquant.cache.table import row_of
from veloxquant.cli import exit_codes
from veloxquant.cli.control import call, is_running
from veloxquant.cli.fit import shape_of
from veloxquant.cli.models import pick, room_now
from veloxquant.cli.output import CliError, envelope, gib, result, talk, usage_error
from veloxquant.cli.overrides import check_ready, parse_overrides
from veloxquant.cli.starting import summary, wait_until_ready
from veloxquant.config.last_start import load_last, save_last
from veloxquant.config.settings import Settings, load_settings
from veloxquant.config.small_models import BITS, SMALL_BITS, options_by_method, options_for
from veloxquant.planning.fit import best_start, fit_row, fit_table
from veloxquant.planning.method_settings import refusal
from veloxquant.planning.model_shape import ModelShape
from veloxquant.planning.models import LocalModel
from veloxquant.planning.room import Room

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be started."""

    model: LocalModel
    shape: ModelShape
    method: str
    options: dict[str, Any]
    context: int


def up(args: argparse.Namespace) -> int:
    """Start the server and wait until it is ready."""
    settings = load_settings(
        {
            "server.host": args.host,
            "server.port": args.port,
            "server.api_key": args.api_key,
            "server.batch": args.batch,
            "server.max_tokens": args.max_tokens,
        }
    )
    for notice in settings.notices:
        talk(f"warning: {notice}")
    host = settings.value("server.host")
    if host not in LOOPBACK and not settings.value("server.api_key"):
        usage_error(
            f"{host} can be reached from other machines, so a key is needed.",
            "Add --api-key, or leave out --host.",
        )
    wanted = _choose(args, settings)
    room = room_now(args.memory_limit)
    _guard(wanted, room, settings, force=args.force)
    named = _named_port(args, settings)
    spec = _spec(args, wanted, settings) | ({"port": named} if named else {})
    call("start", {"spec": spec}, start=True)
    save_last(wanted.model.name, wanted.method, wanted.context, wanted.options, named)
    if args.detach:
        data = summary(call("status"))
        result(envelope(data) if args.json else f"{data['phase']}: {wanted.model.name}")
        return exit_codes.OK
    try:
        return wait_until_ready(args.json)
    except KeyboardInterrupt:
        talk("Stopping the server that was starting (--detach would leave it).")
        if is_running():
            call("stop", {"grace": 0.0})
        raise


def _choose(args: argparse.Namespace, settings: Settings) -> Wanted:
    last = load_last()
    name = args.model or last.get("model")
    if not name:
        usage_error("Which model?", "`vq models ls` lists them; `vq models demo` fetches one.")
    model = pick(str(name))
    shape = shape_of(model)
    context = args.context or min(settings.value("server.context"), shape.native_context)
    if context > shape.native_context:
        talk(
            f"warning: {context:,} tokens are more than the {shape.native_context:,} "
            f"that {model.name} was made for; answers may get worse"
        )
    again = last.get("method") if args.model is None else None
    method = args.method or again or settings.value("server.method")
    if method == "auto":
        room = room_now(args.memory_limit).nbytes
        found = best_start(
            fit_table(
                shape, context, 1, room, options=options_by_method(model.params),
                answer=settings.value("server.max_tokens"),
            )
        )  # fmt: skip
        method = found.method if found else "turboquant_rvq"
        talk(f"method {method} (the first that fits)")
    options = parse_overrides(args.overrides, method, args.bits)
    if not options and args.model is None and args.method is None and method == again:
        kept = last.get("options", {})
        options = {} if refusal(method, kept) else kept
    check_ready(method)
    gentle = options_for(method, model.params)
    if gentle and BITS not in options and method != again:
        options = {**options, **gentle}
        talk(f"{SMALL_BITS} bits, since a small model feels fewer; --bits 2 takes fewer")
    return Wanted(model, shape, method, options, context)


def _named_port(args: argparse.Namespace, settings: Settings) -> int | None:
    """The port of --port, or that of the last start when this is the same again.

    A setting goes before the last start: it was made to last.
    """
    if args.port is not None or args.model is not None:
        return args.port
    port = load_last().get("port")
    if port is None or settings.origin("server.port") != "default":
        return None
    talk(f"port {port}, as in the last start")
    return port


def _guard(wanted: Wanted, room: Room, settings: Settings, *, force: bool) -> None:
    """Refuse what does not fit, with the arithmetic and what would."""
    if settings.value("memory.guard") == "off":
        return
    row = fit_row(
        wanted.shape, row_of(wanted.method), wanted.context, 1, room.nbytes,
        options=wanted.options, answer=settings.value("server.max_tokens"),
    )  # fmt: skip
    if row.peak_bytes is None or row.peak_bytes <= room.nbytes:
        return
    message = (
        f"{wanted.model.name} with {wanted.method} at {wanted.context:,} tokens needs "
        f"{gib(row.peak_bytes)} (weights {gib(wanted.shape.resident_weights)}, "
        f"kv {gib(row.kv_bytes)}); {room.describe()}."
    )
    if force:
        talk(f"warning: {message}")
        return
    table = fit_table(
        wanted.shape, wanted.context, 1, room.nbytes,
        options=options_by_method(wanted.model.params),
        answer=settings.value("server.max_tokens"),
    )  # fmt: skip
    ways = [f"--context {row.max_context}"] if row.max_context else []
    ways += [f"--method {best.method}"] if (best := best_start(table)) else []
    hint = f"Try {' or '.join(ways)}" if ways else "Choose a smaller model"
    raise CliError(message, f"{hint}, or start it all the same with --force.",
                   exit_codes.DOES_NOT_FIT, "does_not_fit")  # fmt: skip


def _spec(args: argparse.Namespace, wanted: Wanted, settings: Settings) -> dict[str, Any]:
    """Fields of `supervisor.messages.LaunchSpec`."""
    return {
        "model": str(wanted.model.path),
        "name": wanted.model.name,
        "method": wanted.method,
        "options": wanted.options,
        "context": wanted.context,
        "batch": settings.value("server.batch"),
        "host": settings.value("server.host"),
        "port": settings.value("server.port"),
        "max_tokens": settings.value("server.max_tokens"),
        "memory_limit": args.memory_limit,
        "api_key": settings.value("server.api_key"),
        "openblas": settings.value("server.openblas"),
    }
