import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyte
import pytest

from veloxquant.cli import exit_codes
from veloxquant.config.last_start import load_last
from veloxquant.supervisor.client import CommandError, LinkChange, NotConnectedError
from veloxquant.supervisor.failures import FAILURES, fault
from veloxquant.supervisor.history import History
from veloxquant.supervisor.logs import format_line
from veloxquant.supervisor.messages import (
    Event,
    LaunchSpec,
    LayerRow,
    Log,
    Profile,
    Progress,
    Snapshot,
    StageReport,
    State,
    Stats,
    plain,
)
from veloxquant.supervisor.paths import find

Run = Callable[..., tuple[int, str, str]]


def event(seq: int, body: Any) -> Event:
    return Event("e", seq, 0.0, body)


@pytest.mark.parametrize("words", [("status",), ("stop",), ("shutdown",), ("status", "--watch")])
def test_nothing_running_is_no_error_and_starts_nothing(run: Run, home: Path, words: tuple) -> None:
    assert run(*words) == (0, "stopped: no server is running\n", "")
    assert json.loads(run(*words, "--json")[1])["data"]["phase"] == "stopped"
    assert not (home / "run").exists()


@pytest.mark.parametrize("words", [("restart",), ("logs",), ("chat", "-p", "hi")])
def test_what_needs_a_server_is_code_3_without_one(run: Run, words: tuple) -> None:
    code, out, err = run(*words)
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert "vq up" in err


def test_up_prints_the_base_url_and_remembers(run: Run, demo: Path, supervisor: Any) -> None:
    supervisor.events = [
        Snapshot("e", 1, State("starting")),
        event(2, Progress(StageReport("weights", "now", "Tiny-1B", total=1 << 30))),
        event(3, Progress(StageReport("weights", "done", seconds=1.0))),
        event(4, State("ready", warnings=["mind the gap"])),
    ]
    code, out, err = run("up", "tiny-1b", "--method", "kivi", "--bits", "4", "--context", "4k",
                         "--set", "kivi_group_size=64")  # fmt: skip
    assert (code, out) == (0, "http://127.0.0.1:8000/v1\n")
    assert "1.00 GiB" in err
    assert "mind the gap" in err
    spec = dict(supervisor.calls)["start"]["spec"]
    assert LaunchSpec(**spec).options == {"bit_width_inlier": 4, "kivi_group_size": 64}
    assert (spec["model"], spec["name"], spec["context"]) == (str(demo), "Tiny-1B", 4096)
    options = {"bit_width_inlier": 4, "kivi_group_size": 64}
    last = {"model": "Tiny-1B", "method": "kivi", "context": 4096, "options": options}
    assert load_last() == last
    assert run("up", "--json")[0] == 0  # the same again
    again = LaunchSpec(**dict(supervisor.calls[-2:])["start"]["spec"])
    assert (again.method, again.options) == ("kivi", options)
    assert run("up", "Tiny-1B", "--method", "kivi", "--detach")[0] == 0
    defaults = {"bit_width_inlier": 4}  # a small model's
    assert load_last()["options"] == defaults, "a method that is named comes with its defaults"


def test_the_port_of_the_last_start_unless_flags_or_settings_say_otherwise(
    run: Run, demo: Path, supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def port_of(*words: str) -> tuple[int, bool]:
        code, _, err = run("up", *words, "--detach")
        assert code == 0, err
        return dict(supervisor.calls[-2:])["start"]["spec"]["port"], "last start" in err

    supervisor.state("starting")
    assert port_of("Tiny-1B", "--port", "8111") == (8111, False)
    assert port_of() == (8111, True)
    assert port_of("--method", "kivi") == (8111, True), "still remembered"
    with monkeypatch.context() as patch:
        patch.setenv("VELOXQUANT_SERVER_PORT", "8200")
        assert port_of() == (8200, False)
    assert port_of() == (8000, False), "that start had no port of its own"
    assert port_of("--port", "8111") == (8111, False)
    assert port_of("Tiny-1B") == (8000, False), "a model that is named starts anew"
    assert port_of("--port", "8111") == (8111, False)
    assert run("config", "set", "server.port", "8300")[0] == 0
    assert port_of() == (8300, False)


def test_up_detached_returns_at_once(run: Run, demo: Path, supervisor: Any) -> None:
    supervisor.state("starting")
    assert run("up", "Tiny-1B", "--detach")[1] == "starting: Tiny-1B\n"
    data = json.loads(run("up", "Tiny-1B", "--detach", "--json")[1])["data"]
    assert (data["phase"], data["api_key"], data["token_file"]) == ("starting", False, None)


def test_a_small_model_gets_more_bits_unless_somebody_chose(
    run: Run, demo: Path, supervisor: Any
) -> None:
    def options_of(*words: str) -> tuple[dict[str, Any], str]:
        code, _, err = run("up", *words, "--detach")
        assert code == 0, err
        return dict(supervisor.calls[-2:])["start"]["spec"]["options"], err

    supervisor.state("starting")
    chosen, err = options_of("Tiny-1B")  # its weights are those of 4,096 parameters
    assert (chosen, "small model" in err) == ({"bit_width_inlier": 4}, True)
    assert options_of("Tiny-1B", "--bits", "2")[0] == {"bit_width_inlier": 2}
    chosen, err = options_of("Tiny-1B", "--method", "kivi")
    assert (chosen, "small model" in err) == ({"bit_width_inlier": 4}, True)
    assert options_of("Tiny-1B", "--method", "kivi", "--bits", "2")[0] == {"bit_width_inlier": 2}
    assert options_of()[0] == {"bit_width_inlier": 2}, "the same again"


EXIT = {"usage": 2, "model_missing": 3, "does_not_fit": 4, "port_taken": 5, "unsupported": 7}


@pytest.mark.parametrize("code", FAILURES)
def test_a_failed_start_says_why_and_leaves_with_its_code(
    run: Run, demo: Path, supervisor: Any, code: str
) -> None:
    supervisor.events = [
        Snapshot("e", 1, State("starting")),
        event(2, State("failed", reason=fault(code, "the detail"))),
    ]
    status, out, err = run("up", "Tiny-1B")
    assert (status, out) == (EXIT.get(code, 1), "")
    assert FAILURES[code].message in err
    assert "the detail" in err
    assert FAILURES[code].hint in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("already_running", "it runs", "stop it"), exit_codes.BUSY),
        (CommandError("port_taken", "taken"), exit_codes.BUSY),
        (CommandError("usage", "bad"), exit_codes.USAGE),
        (CommandError("strange", "odd"), exit_codes.FAILED),
        (NotConnectedError("no answer"), exit_codes.NETWORK),
    ],
)
def test_refused_commands(
    run: Run, demo: Path, supervisor: Any, error: Exception, code: int
) -> None:
    supervisor.raises = error
    assert run("up", "Tiny-1B")[0] == code
    status, out, _ = run("up", "Tiny-1B", "--json")
    assert json.loads(out)["error"]["exit_code"] == status == code


def test_up_gives_up_when_the_supervisor_stays_away(run: Run, demo: Path, supervisor: Any) -> None:
    supervisor.events = [LinkChange(False, "gone", attempt=n) for n in range(1, 9)]
    code, _, err = run("up", "Tiny-1B")
    assert (code, "gone" in err) == (exit_codes.NETWORK, True)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), exit_codes.USAGE, "Which model?"),
        (("nope",), exit_codes.NOT_FOUND, "no model 'nope'"),
        (("Tiny-1B", "--method", "nope"), exit_codes.NOT_FOUND, "no method"),
        (("Tiny-1B", "--set", "snap_budget=1"), exit_codes.USAGE, "it has: bit_width_inlier"),
        (("Tiny-1B", "--host", "0.0.0.0"), exit_codes.USAGE, "--api-key"),
        (("Tiny-1B", "--memory-limit", "100M"), exit_codes.DOES_NOT_FIT, "--force"),
        (("Tiny-1B", "--memory-limit", "2G", "--method", "fp16", "--context", "128k"),
         exit_codes.DOES_NOT_FIT, "--context"),
    ],
)  # fmt: skip
def test_up_refuses_before_anything_starts(
    run: Run, demo: Path, supervisor: Any, words: tuple, code: int, says: str
) -> None:
    status, out, err = run("up", *words)
    assert (status, out) == (code, "")
    assert says in err
    assert supervisor.calls == []


def test_force_starts_what_may_not_fit(run: Run, demo: Path, supervisor: Any) -> None:
    supervisor.events = [Snapshot("e", 1, State("ready"))]
    code, _, err = run("up", "Tiny-1B", "--memory-limit", "100M", "--force")
    assert (code, "warning" in err) == (0, True)


def test_interrupting_a_start_stops_it(
    run: Run, demo: Path, supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from veloxquant.cli import starting

    async def interrupted() -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(starting, "_follow", interrupted)
    assert run("up", "Tiny-1B")[0] == exit_codes.INTERRUPTED
    assert supervisor.calls[-1] == ("stop", {"grace": 0.0})


def test_status_hides_local_paths(run: Run, supervisor: Any) -> None:
    spec = {"model": "/secret/models/Tiny", "method": "kivi", "name": "Tiny"}
    supervisor.state("ready", spec=spec)
    code, out, _ = run("status", "--json")
    assert (code, "/secret" in out) == (0, False)
    assert json.loads(out)["data"]["state"]["spec"]["model"] == "Tiny"
    assert run("status")[1].startswith("ready: Tiny / kivi   http://127.0.0.1:8000/v1   pid 7")


def test_up_and_status_say_whether_a_calibration_is_used(
    run: Run, demo: Path, supervisor: Any
) -> None:
    told = "fitted 2026-11-30, 30 layers"
    supervisor.state("ready", calibration=told)
    supervisor.events = [Snapshot("e", 1, State("ready", calibration=told))]
    assert f"calibration: {told}\n" in run("status")[1]
    assert f"calibration: {told}\n" in run("up", "Tiny-1B")[2]
    assert json.loads(run("up", "Tiny-1B", "--json")[1])["data"]["calibration"] == told
    supervisor.state("ready")
    assert "calibration" not in run("status")[1] + run("up", "Tiny-1B")[2]


def test_json_does_not_call_uncompressed_bytes_those_of_16_bits(run: Run, supervisor: Any) -> None:
    supervisor.answers["status"]["stats"] = plain(Stats(kv_fp16=7))
    supervisor.events = [
        Snapshot("e", 1, State("busy"), Stats(kv_fp16=7)),
        event(2, Profile([LayerRow(0, "plain", "fp16", 7, 7)])),
    ]
    told, watched = run("status", "--json")[1], run("status", "--watch", "--json")[1]
    assert json.loads(told)["data"]["stats"]["kv_uncompressed"] == 7
    assert '"kv_uncompressed": 7' in watched
    assert '"uncompressed": 7' in watched
    assert "kv_fp16" not in told + watched


def test_status_of_an_idle_server_tells_what_its_requests_held(run: Run, supervisor: Any) -> None:
    history = History()
    history.add(0.0, Stats(kv_claimed=3 << 20, kv_resident=4 << 20))
    supervisor.answers["status"]["stats"] = plain(history.latest)
    supervisor.answers["status"]["summary"] = history.summary()
    assert "kv claimed 3.0 MiB resident 4.0 MiB  " in run("status")[1], "that is the peak"
    history.add(5.0, Stats())
    supervisor.answers["status"]["stats"] = plain(history.latest)
    supervisor.answers["status"]["summary"] = history.summary()
    out = run("status")[1]
    assert "kv claimed 0.0 KiB (peak 3.0 MiB) resident 0.0 KiB (peak 4.0 MiB)" in out


def test_watch_prints_one_line_a_change(run: Run, supervisor: Any) -> None:
    supervisor.events = [
        Snapshot("e", 1, State("loading"), Stats()),
        event(2, Stats()),
        event(3, State("ready", pid=9)),
        event(4, Log("warning", "pool", "low \x1b[31mblocks")),
        event(5, Log("info", "http", "quiet")),
        LinkChange(False, "gone"),
    ]
    code, out, err = run("status", "--watch")
    lines = out.splitlines()
    assert code == 0
    assert [line.split(":")[0] for line in lines if ":" in line[:10]] == [
        "loading", "ready", "warning",
    ]  # fmt: skip
    assert sum(line.startswith("memory") for line in lines) == 1
    assert "\x1b" not in out
    assert "gone" in err
    for line in run("status", "--watch", "--json")[1].splitlines():
        json.loads(line)


def test_logs_and_follow_print_each_line_once(run: Run, supervisor: Any) -> None:
    def line(seq: int, text: str) -> dict:
        return {"seq": seq, "t": 0, "wall": 1.5, "level": "info", "source": "http",
                "request": "", "text": text}  # fmt: skip

    supervisor.answers["logs"] = {"lines": [line(3, "three"), line(4, "four")], "dropped": 2}
    supervisor.events = [
        Snapshot("e", 5, State("ready"), logs=[
            event(4, Log("info", "http", "four")), event(5, Log("error", "http", "five")),
        ]),
        event(6, Log("debug", "http", "hidden")),
        event(7, Log("info", "http", "seven")),
    ]  # fmt: skip
    code, out, err = run("logs", "--follow", "--last", "2")
    assert code == 0
    assert [row.split()[-1] for row in out.splitlines()] == ["three", "four", "five", "seven"]
    assert "2 older lines" in err
    _, out, _ = run("logs", "-f", "--json", "--grep", "SEV")
    assert [json.loads(row)["text"] for row in out.splitlines()] == ["three", "four", "seven"]
    assert supervisor.calls[-1] == ("logs", {"last": 200, "level": "info", "grep": "SEV"})


def test_stop_says_what_was_reached(run: Run, supervisor: Any) -> None:
    assert run("stop", "--grace", "3")[1].startswith("stopped:")
    assert ("stop", {"grace": 3.0}) in supervisor.calls
    assert run("stop", "--grace", "-1")[0] == exit_codes.USAGE


def test_shutdown_says_stopped_only_when_the_supervisor_has_ended(
    run: Run, supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        supervisor.answers["shutdown"] = {"pid": process.pid}
        monkeypatch.setattr("veloxquant.cli.server.SHUTDOWN_SECONDS", 0.1)
        assert run("shutdown")[1].startswith("stopping:")
        assert json.loads(run("shutdown", "--json")[1])["data"]["phase"] == "stopping"
        process.kill()
    assert run("shutdown")[1] == "stopped: server and supervisor\n"
    supervisor.answers["shutdown"] = {}  # one of another version, which does not say who it is
    assert run("shutdown")[1].startswith("stopping:")


def test_status_of_a_failed_server_is_code_1(run: Run, supervisor: Any) -> None:
    supervisor.state("failed")
    assert run("status")[0] == exit_codes.FAILED
    code, out, _ = run("status", "--json")
    assert (code, json.loads(out)["data"]["phase"]) == (exit_codes.FAILED, "failed")
    supervisor.state("loading")
    assert run("status")[0] == exit_codes.OK


STAGES = [
    Snapshot("e", 0, State("starting", stages=[StageReport("process", "now")])),
    event(1, Progress(StageReport("process", "done", "pid 7"))),
    event(2, Progress(StageReport("weights", "now", "Tiny", done=1 << 20, total=3 << 20))),
    event(3, Progress(StageReport("weights", "now", "Tiny", done=2 << 20, total=3 << 20))),
    event(4, Progress(StageReport("weights", "done", "Tiny", seconds=1.0))),
    event(5, Progress(StageReport("canary", "now", "trial tokens"))),
    event(6, Progress(StageReport("canary", "now", "recall check, 598 tokens", 0, 598))),
]


def test_up_prints_one_line_a_stage(run: Run, demo: Path, supervisor: Any) -> None:
    supervisor.events = [
        *STAGES,
        event(7, Progress(StageReport("canary", "done", "recall check", seconds=2.0))),
        event(8, State("ready", stages=[StageReport("canary", "done", "recall check")])),
    ]
    err = run("up", "Tiny-1B", "--method", "fp16")[2]
    assert err.splitlines() == [
        "done   process  pid 7",
        "done   weights  Tiny 3.0 MiB 1.0 s",
        "done   canary   recall check 2.0 s",
    ]


def test_up_rewrites_the_line_of_a_stage_on_a_terminal(
    run: Run, demo: Path, supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.events = [*STAGES, event(7, State("failed", reason=fault("bad_model", "x" * 90)))]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    err = run("up", "Tiny-1B", "--method", "fp16")[2]
    screen = pyte.Screen(40, 12)
    pyte.Stream(screen).feed(err.replace("\n", "\r\n"))
    shown = [line.rstrip() for line in screen.display]
    assert "now    weights  Tiny 2.0 MiB of 3.0 MiB" in err
    assert shown[:3] == [
        "done   process  pid 7",
        "done   weights  Tiny 3.0 MiB 1.0 s",
        "now    canary   recall check, 598 token",
    ]
    assert shown[3].startswith("error:")


def test_logs_of_a_supervisor_that_has_gone_are_read_from_its_file(run: Run, home: Path) -> None:
    assert run("logs")[0] == exit_codes.NOT_FOUND
    folder = find().log
    folder.mkdir(parents=True)
    lines = [
        format_line(Log(level=level, source="serving", text=text, wall=wall))
        for level, text, wall in (
            ("debug", "quiet", 1.5), ("info", "one", 2.5), ("error", "it broke \x1b[2J", 3.5),
        )
    ]  # fmt: skip
    (folder / "server.log").write_text("".join(lines) + "a line of another kind\n")
    code, out, err = run("logs")
    assert code == 0
    assert out.splitlines()[0].endswith("one")
    assert len(out.splitlines()) == 2
    assert "\x1b" not in out
    assert "no supervisor is running" in err
    assert len(run("logs", "--level", "debug")[1].splitlines()) == 3
    assert run("logs", "--last", "1", "--grep", "BROKE")[1].count("\n") == 1
    assert json.loads(run("logs", "--json", "--last", "1")[1])["level"] == "error"
    assert run("logs", "--grep", "nothing")[0] == exit_codes.NOT_FOUND
