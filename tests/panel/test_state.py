"""Folding messages into the view: order, doubles, gaps, reconnects, ends."""

import msgspec
import panel_fakes as fakes
import pytest

from veloxquant.panel.state import (
    MAX_HISTORY,
    MAX_LOGS,
    LinkNews,
    View,
    fold,
    freshness,
    kv_gap,
    model_name,
)
from veloxquant.supervisor.messages import (
    Event,
    Fault,
    Gap,
    LaunchSpec,
    Log,
    Progress,
    Request,
    StageReport,
    State,
    Stats,
)


def view_of(*messages, now=0.0):
    return fold(View(), messages, now)


def test_snapshot_sets_everything():
    view = view_of(*fakes.serving(20))
    assert view.link == "live"
    assert view.is_serving
    assert view.model_name == "Qwen3-8B-4bit"
    assert view.base_url == "http://127.0.0.1:8000/v1"
    assert len(view.logs) == 20
    assert len(view.history) == 300
    assert view.profile.tokens == 12_960
    assert view.seq == 21


def test_repeated_and_foreign_events_change_nothing():
    view = view_of(fakes.snapshot(seq=5))
    for stray in (
        fakes.event(5, Log(level="info", source="a", text="old")),
        fakes.event(9, Log(level="info", source="a", text="other"), epoch="e2"),
    ):
        assert fold(view, [stray], 1.0) is view


def test_old_view_is_untouched():
    before = view_of(*fakes.serving(3))
    logs, requests = before.logs, before.requests
    after = fold(before, [fakes.event(50, Log(level="info", source="x", text="y"))], 1.0)
    assert before.logs is logs
    assert before.requests is requests
    assert len(after.logs) == 4


def test_logs_are_cleaned_counted_and_capped():
    view = view_of(fakes.snapshot())
    batch = [
        fakes.event(i + 1, Log(level="info", source="s\x1b", text=f"\x1b]0;{i}\x07"))
        for i in range(MAX_LOGS + 5)
    ]
    view = fold(view, batch, 1.0)
    assert len(view.logs) == MAX_LOGS
    assert view.log_total == MAX_LOGS + 5
    assert "\x1b" not in view.logs[-1].text + view.logs[-1].source
    assert view.logs[-1].text.endswith(f"{MAX_LOGS + 4}␇")


def test_a_gap_is_a_visible_line():
    view = fold(view_of(fakes.snapshot()), [fakes.event(1, Gap("log", 1234))], 0.0)
    assert "1,234 log lines were dropped" in view.logs[-1].text
    view = fold(view, [fakes.event(2, Gap("stats", 3))], 0.0)
    assert len(view.logs) == 1


def test_progress_replaces_its_stage():
    view = view_of(fakes.snapshot(fakes.STARTING))
    report = StageReport("weights", "done", seconds=7.0)
    view = fold(view, [fakes.event(1, Progress(report))], 0.0)
    assert [stage.state for stage in view.server.stages] == ["done"] * 3
    view = fold(view, [fakes.event(2, Progress(StageReport("cache", "now")))], 0.0)
    assert view.server.stages[-1].stage == "cache"
    assert fakes.STARTING.stages[2].state == "now", "messages are not changed in place"


def test_requests_are_merged_by_id():
    view = view_of(fakes.snapshot())
    view = fold(
        view, [fakes.event(1, Request("a", "queued")), fakes.event(2, Request("b", "done"))], 0.0
    )
    view = fold(view, [fakes.event(3, Request("a", "decode", output_tokens=3))], 0.0)
    assert [(r.id, r.state) for r in view.requests] == [("a", "decode"), ("b", "done")]


def test_history_has_one_point_a_second():
    view = view_of(fakes.snapshot())
    events = [fakes.event(i + 1, Stats(footprint=i), t=i / 4) for i in range(4 * MAX_HISTORY + 80)]
    view = fold(view, events, 0.0)
    assert len(view.history) == MAX_HISTORY
    assert view.history[-1].t - view.history[-2].t == 1.0


def test_gauges_of_a_process_that_ended_are_gone():
    view = view_of(*fakes.serving(3))
    view = fold(view, [fakes.event(50, State(phase="stopped", spec=fakes.SPEC))], 9.0)
    assert view.stats is None
    assert view.profile is None
    assert view.phase_at == 9.0
    crashed = fold(view_of(*fakes.serving(3)), [fakes.event(50, State(phase="crashed"))], 9.0)
    assert crashed.stats is not None, "the last figures help to see why"


def test_reconnect_to_the_same_supervisor_keeps_older_lines():
    view = view_of(fakes.snapshot(seq=40, logs=fakes.logs(40)))
    view = fold(view, [LinkNews(False, "gone")], 1.0)
    assert view.link == "lost"
    assert view.logs
    view = fold(view, [fakes.snapshot(seq=60, logs=fakes.logs(30, first=31))], 2.0)
    assert view.link == "live"
    assert [line.seq for line in view.logs] == list(range(1, 61))


def test_a_new_supervisor_starts_afresh():
    view = view_of(*fakes.serving(5))
    other = msgspec.structs.replace(fakes.snapshot(), epoch="e2")
    view = fold(view, [other], 1.0)
    assert not view.logs
    assert view.profile is None
    assert not view.is_running


@pytest.mark.parametrize(
    ("age", "word"), [(0, "fresh"), (4.9, "fresh"), (5, "stale"), (10, "silent")]
)
def test_freshness(age, word):
    view = view_of(fakes.snapshot(fakes.READY), now=100.0)
    assert freshness(view, 100.0 + age) == word


def test_freshness_of_what_does_not_run_and_of_what_is_flagged():
    assert freshness(view_of(fakes.snapshot()), 1e6) == "fresh"
    assert freshness(view_of(fakes.snapshot(fakes.STARTING)), 1e6) == "fresh"
    flagged = State(phase="ready", unresponsive=True)
    assert freshness(view_of(fakes.snapshot(flagged)), 0.0) == "silent"


def test_gap_between_claimed_and_held():
    assert kv_gap(Stats(kv_claimed=100 << 20, kv_resident=130 << 20)) == pytest.approx(0.3)
    assert kv_gap(Stats(kv_claimed=100, kv_resident=200)) == 0.0, "noise below the floor"
    assert kv_gap(Stats(kv_claimed=0, kv_resident=64 << 20)) == 0.0


def test_fault_of_a_failed_state_and_of_a_refusal():
    assert view_of(fakes.snapshot(fakes.FAILED)).fault.code == "port_taken"
    assert view_of(fakes.snapshot(State(phase="crashed"))).fault.code == "crashed"
    view = View(refused=Fault("usage", "no"), server=fakes.READY)
    assert view.fault.code == "usage"
    view = fold(View(epoch="e1", refused=Fault("usage", "no")), [fakes.event(1, fakes.READY)], 0.0)
    assert view.fault is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen3-8B-4bit", "Qwen3-8B-4bit"),
        ("/models/Qwen3-8B-4bit/", "Qwen3-8B-4bit"),
        ("org/model", "model"),
        ("/hub/models--org--tiny/snapshots/0123abcd", "tiny"),
        ("/m/\x1b[31mred", "␛[31mred"),
        ("", ""),
    ],
)
def test_model_name(path, name):
    assert model_name(path) == name


def test_base_url_brackets_ipv6():
    view = View(server=State(phase="ready", spec=LaunchSpec(model="m", host="::1"), port=9))
    assert view.base_url == "http://[::1]:9/v1"


def test_a_server_lost_with_its_supervisor_is_remembered_until_another_starts():
    view = fold(View(), [fakes.snapshot(fakes.READY)], 10.0)
    view = fold(view, [LinkNews(False, "gone")], 20.0)
    reborn = msgspec.structs.replace(fakes.snapshot(), epoch="another")
    view = fold(view, [LinkNews(False, "still"), LinkNews(True), reborn], 25.0)
    assert (view.lost_spec, view.lost_at) == (fakes.READY.spec, 20.0)
    starting = Event(seq=reborn.seq + 1, t=1.0, epoch="another", body=State(phase="starting"))
    assert fold(view, [starting], 26.0).lost_spec is None


def test_nothing_is_lost_where_nothing_ran():
    view = fold(View(), [fakes.snapshot()], 10.0)
    reborn = msgspec.structs.replace(fakes.snapshot(), epoch="another")
    assert fold(view, [LinkNews(False), reborn], 25.0).lost_spec is None
