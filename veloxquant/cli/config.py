"""`vq config`: read and change the settings."""

import argparse
from typing import Any

from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError, envelope, result, table, talk, usage_error
from veloxquant.config.settings import (
    SETTINGS,
    SettingError,
    Settings,
    load_settings,
    parse,
    save_setting,
    setting,
)


def _load() -> Settings:
    settings = load_settings()
    for notice in settings.notices:
        talk(f"warning: {notice}")
    return settings


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(value)
    return "" if value is None else str(value)


def ls(args: argparse.Namespace) -> int:
    """All settings with their values and origins."""
    settings = _load()
    if args.json:
        data = {
            key: {"value": settings.value(key), "origin": settings.origin(key), "help": entry.help}
            for key, entry in SETTINGS.items()
        }
        result(envelope(data, settings.notices))
        return exit_codes.OK
    rows = [
        [key, _text(settings.value(key)) or "-", settings.origin(key), entry.help]
        for key, entry in SETTINGS.items()
    ]
    result(table(["SETTING", "VALUE", "FROM", "WHAT IT IS"], rows))
    return exit_codes.OK


def get(args: argparse.Namespace) -> int:
    """One setting."""
    settings = _load()
    try:
        value, origin = settings.value(args.key), settings.origin(args.key)
    except SettingError as error:
        raise CliError(f"{error}.", "`vq config ls`", exit_codes.NOT_FOUND) from error
    if args.json:
        result(envelope({"key": args.key, "value": value, "origin": origin}))
    else:
        result(_text(value))
    return exit_codes.OK


def set_(args: argparse.Namespace) -> int:
    """Change one setting; an empty value goes back to the default."""
    try:
        entry = setting(args.key)
        value = parse(entry, args.value) if args.value.strip() else None
        save_setting(args.key, value)
    except SettingError as error:
        usage_error(f"{error}.", "`vq config ls` shows all settings.")
    except OSError as error:
        raise CliError(f"The settings cannot be written: {error.strerror}.") from error
    settings = _load()
    if args.json:
        result(envelope({"key": args.key, "value": settings.value(args.key)}))
    elif settings.origin(args.key) == "environment":
        talk(f"Saved, but {entry.variable} is set and wins.")
    return exit_codes.OK


def path(args: argparse.Namespace) -> int:
    """The settings file."""
    file = str(load_settings().path)
    result(envelope({"path": file}) if args.json else file)
    return exit_codes.OK
