"""Planning as the panel's `Library`; imported in a thread after the first paint, free of MLX."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from veloxquant.cache.table import TABLE
from veloxquant.config.last_start import load_last, save_last
from veloxquant.config.settings import SETTINGS, load_settings
from veloxquant.config.small_models import options_by_method
from veloxquant.panel import units
from veloxquant.panel.ports import (
    Check,
    CommandFailed,
    FitItem,
    FitReport,
    Memory,
    ModelItem,
    Report,
    SettingItem,
)
from veloxquant.panel.text import clean, settings_words
from veloxquant.planning import doctor
from veloxquant.planning.baseline import baseline_note
from veloxquant.planning.fit import FitRow, best_start, fit_table, longest
from veloxquant.planning.method_settings import SettingsError, fields_of, parse_setting, refusal
from veloxquant.planning.model_shape import ModelShape, ShapeError, read_shape
from veloxquant.planning.models import LocalModel, Scan, model_roots, scan_models
from veloxquant.planning.room import Room, measure_room, this_backend
from veloxquant.supervisor.messages import LaunchSpec

_ORIGINS = {"own": "this program's own folder", "hub": "Hugging Face cache (shared)",
            "folder": "a folder of yours"}  # fmt: skip
_POLL_S = 0.2


class PlanningLibrary:
    """Asks planning; keeps only the last scan."""

    def __init__(self) -> None:
        self._scan = Scan()

    # ---- this machine -----------------------------------------------------------------------

    def memory(self) -> Memory:
        """Memory of this machine now."""
        found = psutil.virtual_memory()
        room = self._room()
        note = room.describe().removeprefix("room ")
        return Memory(found.total - found.available, found.total, room.nbytes, note)

    @staticmethod
    def _room(own: int = 0) -> Room:
        return measure_room(keep_free=load_settings().value("memory.keep_free"), own=own)

    def checks(self, models: list[ModelItem]) -> list[Check]:  # noqa: ARG002 - the scan is kept
        """The doctor's findings; the port counts only while no server of ours has it."""
        settings = load_settings()
        found = doctor.check_all(
            self._room(), self._scan, settings.value("server.host"), settings.value("server.port")
        )
        out = [Check(check.status, check.text, check.hint) for check in found]
        terminal = doctor.check_terminal()
        out.append(Check(terminal.status, terminal.text, terminal.hint))
        out += [Check("warn", text, "`vq config path` names the file") for text in settings.notices]
        return out

    def settings(self) -> list[SettingItem]:
        """Every setting with its value and where that comes from."""
        settings = load_settings()
        return [
            SettingItem(key, _words(settings.value(key)), settings.origin(key), entry.help,
                        entry.variable)
            for key, entry in SETTINGS.items()
        ]  # fmt: skip

    def config_path(self) -> str:
        """The user's settings file."""
        return str(load_settings().path)

    def template(self) -> LaunchSpec:
        """A start with everything the settings say and no model."""
        settings = load_settings()
        return LaunchSpec(
            model="",
            method=settings.value("server.method"),
            context=settings.value("server.context"),
            batch=settings.value("server.batch"),
            host=settings.value("server.host"),
            port=settings.value("server.port"),
            max_tokens=settings.value("server.max_tokens"),
            api_key=settings.value("server.api_key"),
            openblas=settings.value("server.openblas"),
        )

    def last_start(self) -> dict[str, object]:
        """Model, method and context of the last start, shared with the command line."""
        return dict(load_last())

    def keep_start(self, spec: LaunchSpec) -> None:
        """Remember a start that was accepted."""
        save_last(spec.name or spec.model, spec.method, spec.context, spec.options)

    def free_port(self, host: str, wanted: int) -> int:
        """`wanted`, or the next port that can be bound; `wanted` when none can."""
        following = range(wanted, min(wanted + 200, 65_536))
        return next((port for port in following if doctor.is_free(host, port)), wanted)

    # ---- models -----------------------------------------------------------------------------

    def models(self) -> list[ModelItem]:
        """Models on this machine, those that can run first."""
        self._scan = scan_models(model_roots(load_settings().value("models.folders")))
        room, template = self._room(), self.template()
        items = [self._item(model, room, template) for model in self._scan.models]
        return sorted(items, key=lambda item: (not item.runnable, item.name.casefold()))

    def _item(self, model: LocalModel, room: Room, template: LaunchSpec) -> ModelItem:
        item = ModelItem(
            name=model.name,
            path=str(model.path),
            params=model.params,
            quant=model.quant,
            disk=model.disk_bytes,
            runnable=model.runnable,
            why_not=model.why,
            used_s_ago=max(0.0, time.time() - model.modified) if model.modified else None,
            facts=(("where", _ORIGINS[model.origin]), ("folder", str(model.path))),
        )
        if not model.runnable:
            return item
        try:
            shape = read_shape(model.path)
            rows = fit_table(
                shape, shape.native_context, 1, room.nbytes,
                options=options_by_method(model.params), answer=template.max_tokens,
            )  # fmt: skip
        except (ShapeError, ValueError, OSError) as error:
            return replace(item, fits_note="sizes unknown", why_not=str(error))
        best = longest(rows, template.method)
        short = 0 if best is None else best.max_context or 0
        lacking = ""
        if not short:
            least = min((row.peak_bytes for row in rows if row.peak_bytes), default=0)
            lacking = f"needs {units.size(least - room.nbytes)} more" if least else "too big here"
        return replace(
            item,
            fits_tokens=short,
            fits_method=best.method if best else "",
            fits_note=lacking,
            native_context=shape.native_context,
            facts=(*_facts(model, shape), *item.facts),
        )

    # ---- method tables ----------------------------------------------------------------------

    def fit(
        self,
        model: ModelItem,
        context: int,
        batch: int,
        own: int = 0,
        options: Mapping[str, dict[str, Any]] | None = None,
    ) -> FitReport:
        """The method table for one model.

        Raises:
            CommandFailed: when the model's sizes cannot be read.
        """
        try:
            shape = read_shape(Path(model.path))
        except (ShapeError, OSError) as error:
            raise CommandFailed(
                "bad_model", f"The sizes of {model.name} are unknown: {error}.",
                "Pick another model: press 1.",
            ) from error  # fmt: skip
        room = self._room(own)
        answer = self.template().max_tokens
        table = fit_table(shape, context, batch, room.nbytes, options=options, answer=answer)
        best = best_start(table)
        return FitReport(
            model=model,
            context=context,
            batch=batch,
            room=room.nbytes,
            room_note=room.describe().removeprefix("room "),
            weights=shape.resident_weights,
            native_context=shape.native_context,
            rows=tuple(_fit_item(row) for row in table),
            notes=shape.notes,
            best=best.method if best else "",
            answer=min(answer, context),
        )

    def method_settings(self, method: str) -> str:
        """The settings of a method with their defaults; those that are unset have no value."""
        return settings_words({name: f.default for name, f in fields_of(method).items()})

    def parse_settings(self, method: str, text: str) -> dict[str, Any]:
        """Settings from `name=value` words; a number alone is the bit width.

        Raises:
            CommandFailed: with the reason.
        """
        options: dict[str, Any] = {}
        try:
            for word in text.split():
                name, is_pair, value = word.partition("=")
                if not is_pair:
                    name, value = "bit_width_inlier", word
                options[name] = parse_setting(method, name, value)
        except SettingsError as error:
            raise CommandFailed("usage", str(error)) from error
        if reason := refusal(method, options):
            raise CommandFailed("usage", reason)
        return options

    # ---- the demo model ---------------------------------------------------------------------

    def fetch_demo(self, report: Report, cancelled: Callable[[], bool]) -> str:
        """Run `vq models demo` and pass on what it says; converting needs MLX, we do not have it.

        Raises:
            CommandFailed: when it could not be fetched.
        """
        command = [sys.executable, "-P", "-m", "veloxquant", "models", "demo", "--json"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            text=True, errors="replace",
        )  # fmt: skip
        said = ["starting"]
        threading.Thread(target=_listen, args=(process.stderr, said), daemon=True).start()
        started, answer = time.monotonic(), ""
        while process.poll() is None:
            if cancelled():
                process.terminate()
            report(f"{said[-1]}  ({units.clock(time.monotonic() - started)})", 0, None)
            time.sleep(_POLL_S)
        answer = process.stdout.read() if process.stdout else ""
        return _demo_answer(process.returncode, answer, said)


def _listen(stream: Iterable[str] | None, said: list[str]) -> None:
    for line in stream or ():
        said.append(clean(line.strip(), 200) or said[-1])


def _demo_answer(code: int, answer: str, said: list[str]) -> str:
    try:
        data = msgspec.json.decode(answer.encode())
    except msgspec.DecodeError:
        data = {}
    if code == 0:
        return str(data.get("data", {}).get("path", "")) if isinstance(data, dict) else ""
    error = data.get("error", {}) if isinstance(data, dict) else {}
    raise CommandFailed(
        "demo_failed",
        str(error.get("message") or said[-1]),
        str(error.get("hint") or "d tries again; `vq models demo` says more."),
    )


def _words(value: object) -> str:
    if value is None:
        return "by itself"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _facts(model: LocalModel, shape: ModelShape) -> tuple[tuple[str, str], ...]:
    facts = [f"{model.model_type}, {shape.n_layers} layers"]
    if shape.layers:
        layer = shape.layers[0][0]
        facts.append(f"{layer.n_q_heads}/{layer.n_kv_heads} heads of {layer.k_dim}")
    if shape.n_compressed < shape.n_layers:
        facts.append(f"{shape.n_compressed} layers can be compressed")
    token = f"{units.size(shape.kv_bytes_per_token)} a token"
    token += " in 32 bits" if shape.backend == "cpu" else ""
    weights = f"{units.size(shape.resident_weights)} in memory, uncompressed kv {token}"
    template = "yes" if model.chat_template else "no"
    return (
        ("shape", ", ".join(facts)),
        ("weights", weights),
        ("context", f"made for {shape.native_context:,} tokens"),
        ("chat", f"template {template}   license {model.license or 'not said'}"),
    )


def _fit_item(row: FitRow) -> FitItem:
    known = TABLE.get(row.method)
    return FitItem(
        method=row.method,
        ready=row.ready,
        kind=row.kind,
        bits=row.bits,
        kv=row.kv_bytes,
        reading=row.kv_reading_bytes,
        peak=row.peak_bytes,
        max_context=row.max_context,
        fits=row.fits,
        known="kv exact, peak est." if row.kv_bytes is not None else "",
        note=row.why or row.note or baseline_note(row.method, this_backend()),
        blurb=known.blurb if known else "",
        limit=row.limit or "",
    )
