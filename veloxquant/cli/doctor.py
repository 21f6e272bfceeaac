"""`vq doctor`: check this machine and say what to do."""

import argparse
from dataclasses import asdict

from veloxquant.cli import exit_codes
from veloxquant.cli.control import peek
from veloxquant.cli.models import room_now, scan
from veloxquant.cli.output import clean, envelope, result, styled
from veloxquant.config.settings import load_settings
from veloxquant.planning.doctor import Check, check_all, check_terminal

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(args: argparse.Namespace) -> int:
    """Print every check; fails when one of them does."""
    settings = load_settings()
    status = peek()
    port = settings.value("server.port")
    checks = list(check_all(room_now(), scan(), settings.value("server.host"), port))
    if status and status["state"].get("port") == port:
        checks = [
            Check("port", "ok", f"port {port} is used by our own server") if c.name == "port" else c
            for c in checks
        ]
    checks += [_supervisor(status), check_terminal()]
    checks += [Check("settings", "warn", text, "`vq config path`") for text in settings.notices]
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        result(envelope({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            result(f" {styled(f'{check.status:4}', COLOURS[check.status])}  {clean(check.text)}")
            if check.hint and check.status != "ok":
                result(f"       {clean(check.hint)}")
    return exit_codes.UNSUPPORTED if failed else exit_codes.OK


def _supervisor(status: dict | None) -> Check:
    if status is None:
        return Check("supervisor", "ok", "no server of ours is running")
    phase = status["state"].get("phase", "stopped")
    pid = status.get("supervisor", {}).get("pid")
    if status["state"].get("unresponsive"):
        return Check("supervisor", "warn", "the server does not answer", "`vq restart`")
    return Check("supervisor", "ok", f"supervisor runs (pid {pid}), server {phase}")
