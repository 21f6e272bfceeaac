import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from veloxquant import __version__
from veloxquant.cli import exit_codes
from veloxquant.cli.commands import COMMANDS, Command, size, tokens, walk
from veloxquant.cli.main import build_parser

Run = Callable[..., tuple[int, str, str]]
FORBIDDEN = ("mlx", "mlx_lm", "transformers", "torch", "textual", "aiohttp", "numpy")

ALL: list[tuple[tuple[str, ...], Command]] = []
walk(COMMANDS, lambda words, command: ALL.append((words, command)))


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


@pytest.mark.parametrize(("words", "command"), ALL, ids=[" ".join(words) for words, _ in ALL])
def test_every_command_has_help_json_and_a_function(
    run: Run, words: tuple[str, ...], command: Command
) -> None:
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert "--json" in out
    assert command.help[:20] in re.sub(r"\s+", " ", out)
    module, _, function = command.run.partition(":")
    loaded = __import__(f"veloxquant.cli.{module}", fromlist=[function])
    assert callable(getattr(loaded, function))


def test_help_names_every_command_and_exit_code(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert f"    {command.name}" in out
    for number in exit_codes.MEANING:
        assert re.search(rf"^  {number} ", out, re.MULTILINE)


def test_no_command_means_the_panel() -> None:
    assert parse().run == "panel:run"


def test_a_group_means_its_default() -> None:
    args = parse("models")
    assert (args.run, args.sort, args.json) == ("models:ls", "name", False)


@pytest.mark.parametrize(
    "words", [("--json", "models", "ls"), ("models", "--json", "ls"), ("models", "ls", "--json")]
)
def test_json_is_understood_anywhere(words: tuple[str, ...]) -> None:
    assert parse(*words).json is True


@pytest.mark.parametrize(
    "words",
    [
        ("nope",),
        ("up", "--nope"),
        ("up", "--port", "70000"),
        ("up", "--context", "many"),
        ("fit",),
        ("models", "rm"),
        ("logs", "--level", "loud"),
        ("models", "ls", "--sor", "name"),  # no shortened flags
    ],
)
def test_what_cannot_be_understood_is_code_2(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (exit_codes.USAGE, "")
    assert err.startswith("error: ")
    code, out, err = run(*words, "--json")
    assert code == exit_codes.USAGE
    body = json.loads(out)
    assert body["data"] is None
    assert body["error"]["code"] == "usage"


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"veloxquant {__version__}\n", "")


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("8k", 8192), ("32K", 32768), ("1M", 1 << 20)]
)
def test_tokens(text: str, number: int) -> None:
    assert tokens(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "1.5", "nan", "1e30"])
def test_tokens_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        tokens(text)


@pytest.mark.parametrize(
    ("text", "number"), [("12G", 12 << 30), ("512MiB", 512 << 20), ("1.5gb", 3 << 29), ("7", 7)]
)
def test_size(text: str, number: int) -> None:
    assert size(text) == number


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *words], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    "words", [["--help"], ["models", "ls", "--json"], ["methods", "--json"], ["config", "ls"]]
)
def test_commands_load_no_model_library(words: list[str], home: Path) -> None:
    code = (
        "import sys; from veloxquant.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {FORBIDDEN!r} if m in sys.modules], file=sys.stderr)"
    )
    assert python("-c", code).stderr.strip().splitlines()[-1] == "[]"


def test_help_is_quick() -> None:
    """Processor time, since the wall clock of a busy machine measures its neighbours."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python("-m", "veloxquant", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.15


def test_interrupted_is_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from veloxquant.cli import methods

    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "run", interrupt)
    code, out, err = run("methods")
    assert (code, out, err) == (exit_codes.INTERRUPTED, "", "error: interrupted\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"'{sys.executable}' -P -m veloxquant methods --json | head -c 1 >/dev/null"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, timeout=30, check=False
    )
    assert done.stderr == b""


def test_the_documented_entry_of_the_panel_needs_a_terminal_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from veloxquant.cli import panel

    monkeypatch.setattr("sys.argv", ["veloxquant panel"])
    assert panel.main() == exit_codes.USAGE
    assert "terminal" in capsys.readouterr().err


def test_panel_needs_a_terminal(run: Run) -> None:
    code, out, err = run("panel")
    assert (code, out) == (exit_codes.USAGE, "")
    assert "terminal" in err
