"""Start the panel, or say why this terminal cannot show it."""

import os
import sys


def refusal(env: "dict[str, str] | os._Environ[str]", tty: bool) -> str:
    """Why the panel cannot be drawn here, with the commands that do the same; empty when it can."""
    instead = "use the command line instead: vq up, vq status, vq chat, vq logs (vq --help)"
    if not tty:
        return f"vq panel draws on a terminal, and this is none; {instead}"
    if env.get("TERM", "") in ("", "dumb"):
        return f"this terminal (TERM={env.get('TERM', '')}) cannot draw the panel; {instead}"
    return ""


def _apply_look() -> None:
    """Put the settings of the look where the drawing code reads them: before it is imported.

    Under names of their own: the settings would otherwise seem to be set by the environment.
    """
    from veloxquant.config.settings import load_settings

    settings = load_settings()
    os.environ["_VELOXQUANT_THEME"] = settings.value("look.theme")
    os.environ["_VELOXQUANT_ASCII"] = "1" if settings.value("look.ascii") else "0"
    if "SSH_CONNECTION" in os.environ:
        os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")


def main() -> int:
    """Run the app until it is closed; returns the exit code."""
    # Textual draws on stderr.
    tty = sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
    if why := refusal(os.environ, tty):
        sys.stderr.write(why + "\n")
        return 2
    _apply_look()
    from veloxquant.panel.app import PanelApp

    app = PanelApp()
    return app.run() or app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
