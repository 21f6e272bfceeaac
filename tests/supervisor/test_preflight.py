import dataclasses

import msgspec
import pytest

from veloxquant.cache.table import TABLE
from veloxquant.supervisor.effects import RefusedError
from veloxquant.supervisor.messages import Fault, LaunchSpec
from veloxquant.supervisor.preflight import check_spec, find_model


def spec(**fields) -> LaunchSpec:
    return LaunchSpec(**({"model": "/models/a", "method": "kivi"} | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"port": 0}, "port=0"),
        ({"port": 65_536}, "port=65536"),
        ({"port": True}, "port=True"),
        ({"context": 0}, "context=0"),
        ({"batch": -1}, "batch=-1"),
        ({"memory_limit": 0}, "memory_limit=0"),
        ({"host": "0.0.0.0"}, "without a key"),
        ({"host": "192.168.1.2"}, "without a key"),
        ({"model": "../secret"}, "neither a folder nor a Hub id"),
        ({"model": "a/../b"}, "neither a folder nor a Hub id"),
        ({"model": "a/b/c"}, "neither a folder nor a Hub id"),
        ({"model": ""}, "neither a folder nor a Hub id"),
        ({"model": "https://x/y"}, "neither a folder nor a Hub id"),
        ({"model": "/a\x00b"}, "is no name"),
        ({"method": "kiwi"}, "did you mean kivi"),
        ({"options": {"kivi_grop_size": 32}}, "it has: kivi_group_size"),
        ({"options": {"kivi_group_size": 33}}, "kivi_group_size=33"),
        ({"options": {"bit_width_inlier": 7}}, "bit_width_inlier=7"),
        ({"options": {"snap_budget": 100}}, "no setting 'snap_budget'"),
        ({"options": {"observers": []}}, "no setting 'observers'"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields, says):
    with pytest.raises(RefusedError, match=says) as refused:
        check_spec(spec(**fields))
    assert refused.value.code == "usage"
    assert refused.value.hint


def test_planned_method_is_refused_with_the_ready_ones(monkeypatch):
    row = dataclasses.replace(TABLE["kivi"], status="planned")
    monkeypatch.setitem(TABLE, "kivi", row)
    with pytest.raises(RefusedError, match="not built yet; ready methods: fp16"):
        check_spec(spec())


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "mlx-community/Qwen3-0.6B-4bit"},
        {"model": "~/models/a"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "api_key": True},
        {"method": "fp16"},
        {"options": {"kivi_group_size": 64, "residual_length": 128}},
        {"method": "kivi_sink", "options": {"n_sink_tokens": 2}},
        {"method": "cam", "options": {"eviction_storage": "turboquant3", "cam_budget": 64}},
    ],
)
def test_possible_settings_pass(fields):
    check_spec(spec(**fields))


def test_model_folder_must_hold_a_model(tmp_path):
    missing = find_model(str(tmp_path / "none"))
    assert isinstance(missing, Fault)
    assert missing.code == "model_missing"
    empty = find_model(str(tmp_path))
    assert isinstance(empty, Fault)
    assert "no config.json" in empty.detail
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(half := find_model(str(tmp_path)), Fault)
    assert "safetensors" in half.detail
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_model(str(tmp_path)) == tmp_path


def test_unknown_hub_id_is_missing_without_a_network():
    missing = find_model("nobody-here/no-such-model")
    assert isinstance(missing, Fault)
    assert "not downloaded" in missing.detail


def test_wire_refuses_a_boolean_port():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"model": "a", "port": True}, LaunchSpec)
