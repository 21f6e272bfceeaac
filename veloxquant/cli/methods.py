"""`vq methods`: the table of methods, under the documented keys.

The JSON of this command keeps its documented shape (no envelope). The documents' tiers describe
caches that keep an uncompressed copy; none of ours does, so the tiers here are `honest_bytes`,
`not_trimmable` (after an eviction a prompt prefix cannot be taken back) and `planned`.
"""

import argparse
import json
import textwrap
from typing import Any

from veloxquant.cache.table import TABLE, MethodRow
from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError, clean, result, table
from veloxquant.config.kv_cache import BASELINE, EVICTION_STORAGE
from veloxquant.config.settings import load_settings
from veloxquant.planning.baseline import baseline_note
from veloxquant.planning.method_settings import fields_of
from veloxquant.planning.room import this_backend

SCHEMA_VERSION = 1
DEFAULT_METHOD = "turboquant_rvq"
TIERS = {
    "honest_bytes": "available",
    "not_trimmable": "available (no prompt-cache trimming)",
    "planned": "not available yet",
}


def field_schema(row: MethodRow) -> list[dict[str, Any]]:
    """Type, default and whether it may be empty, for each setting of a method."""
    return [
        {
            "name": field.name,
            "type": field.kind,
            "default": field.default,
            "optional": field.optional,
            "help": "",
        }
        for field in fields_of(row.name).values()
    ]


def tier(row: MethodRow) -> str:
    """Whether a method can be served, and whether its cache can be rewound."""
    if not row.is_ready:
        return "planned"
    return "not_trimmable" if row.trim == "until_evicted" else "honest_bytes"


def as_data(row: MethodRow) -> dict[str, Any]:
    """One method under its documented keys."""
    level = tier(row)
    coverage = "none" if row.kind == "eviction" else "keys_and_values"
    return {
        "name": row.name,
        "family": row.kind,
        "serve_tier": level,
        "serve_tier_label": TIERS[level],
        "maturity": "beta" if row.is_ready else "planned",
        "is_servable": row.is_ready,
        "blurb": row.blurb,
        "config_fields": list(fields_of(row.name)),
        "field_schema": field_schema(row),
        "coverage": coverage,
        "coverage_label": "full estimate" if row.held else "no estimate",
        "paper_deviation": None,
        "is_adapted": False,
        "unsupported_reason": None if row.is_ready else "documented but not built yet",
        "docs_url": None,
        "source": row.source,
        "capabilities": {
            "trim": row.trim,
            "queries": row.queries,
            "calibration": row.calibration,
            "layers_coupled": row.couples,
            "kept_row_forms": list(row.row_forms),
            "batching": row.is_ready,
        },
    }


def payload(*, servable_only: bool = False, family: str | None = None) -> dict[str, Any]:
    """The documented object of `methods --json`."""
    rows = [
        row
        for row in TABLE.values()
        if (row.is_ready or not servable_only) and family in (None, row.kind)
        if row.name != BASELINE or family is None
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "default_serve_method": DEFAULT_METHOD,
        "accounting_only": False,
        "accounting_note": "",
        "methods": [as_data(row) for row in rows],
    }


def run(args: argparse.Namespace) -> int:
    """List the methods."""
    backend = this_backend()
    default = load_settings().value("server.method")
    data = payload(servable_only=args.servable_only, family=args.family)
    if args.json:
        result(json.dumps(data, ensure_ascii=False))
        return exit_codes.OK
    rows = [
        [
            m["name"] + (" *" if m["name"] == default else ""),
            m["family"],
            "ready" if m["is_servable"] else "planned",
            m["blurb"] + (f", {note}" if (note := baseline_note(m["name"], backend)) else ""),
        ]
        for m in data["methods"]
    ]
    if not rows:
        raise CliError("No method matches.", "Leave out a filter.", exit_codes.NOT_FOUND)
    result(table(["METHOD", "FAMILY", "STATUS", "WHAT IT DOES"], rows))
    if names := [m["name"] for m in data["methods"] if m["capabilities"]["kept_row_forms"]]:
        forms = ", ".join(form for form in EVICTION_STORAGE if form != "exact")
        told = f"--set eviction_storage=FORM packs the rows kept by {', '.join(names)}; {forms}"
        result("\n".join(textwrap.wrap(told, 100)))
    result(clean(f"{sum(r[2] == 'ready' for r in rows)} ready"))
    if any(m["name"] == default for m in data["methods"]):
        result(
            "* default of `vq up` (server.method); `vq fit MODEL` stars what it proposes instead"
        )
    return exit_codes.OK


def build_parser() -> argparse.ArgumentParser:
    """The parser of this command alone."""
    from veloxquant.cli.commands import COMMANDS

    parser = argparse.ArgumentParser(prog="veloxquant methods")
    for flag in next(command for command in COMMANDS if command.name == "methods").flags:
        parser.add_argument(*flag.names, **flag.options)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main() -> None:
    """List the methods; the documented entry point."""
    run(build_parser().parse_args())
