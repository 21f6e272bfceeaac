"""Reports and exports hold no folders and no tokens."""

import csv

import panel_fakes as fakes
import pytest

from veloxquant.panel.export import export_layers, export_lines
from veloxquant.panel.report import report_of, without_paths
from veloxquant.panel.state import LogLine, View, fold


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("open /home/me/secret/model.safetensors failed", "open .../model.safetensors failed"),
        ("~/models/x/y.json", ".../y.json"),
        ("token hf_abcdefghijkl used", "token [removed] used"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [removed]"),
        ("GET /v1/models 200", "GET .../models 200"),
        ("http://127.0.0.1:8000/v1 is served", "http://127.0.0.1:8000/v1 is served"),
        ("3/4 done", "3/4 done"),
    ],
)
def test_without_paths(given, shown):
    assert without_paths(given) == shown


def test_report_names_what_matters():
    view = fold(View(), [fakes.snapshot(fakes.FAILED, seq=5, logs=fakes.logs(5))], 0.0)
    report = report_of(view)
    assert "port_taken" in report
    assert "turboquant_rvq" in report
    assert "/models/" not in report


def test_exports_are_private_files(home):
    home.mkdir()
    lines = [LogLine(1, fakes.WALL, "info", "worker", "read /home/me/x/model.bin")]
    path = export_lines(lines)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "/home/me" not in path.read_text()
    table = export_layers(fakes.PROFILE.layers)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 36
    assert int(rows[3]["uncompressed_bytes"]) == 51 << 20
