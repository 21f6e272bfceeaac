import dataclasses
from typing import Any

import pytest

from veloxquant.cache.table import TABLE
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.planning.method_settings import (
    SettingsError,
    config_of,
    fields_of,
    parse_setting,
    refusal,
)


@pytest.mark.parametrize("method", TABLE)
def test_every_field_of_a_method_has_a_type(method: str) -> None:
    fields = fields_of(method)
    own = {field.name for field in dataclasses.fields(TABLE[method].options)}
    assert own <= set(fields)
    kinds = {"int", "float", "bool", "str", "array", "unknown"}
    assert {field.kind for field in fields.values()} <= kinds


@pytest.mark.parametrize(
    ("method", "name", "text", "value"),
    [
        ("kivi", "kivi_group_size", "64", 64),
        ("kivi", "residual_length", " 256 ", 256),
        ("kivi", "bit_width_inlier", "2", 2),
        ("kivi", "bit_width_inlier", "2,4, 4", [2, 4, 4]),
        ("svdq", "svdq_rank", "", None),
        ("svdq", "svdq_energy_threshold", "0.9", 0.9),
        ("svdq", "svdq_bit_schedule", "8,4,2", [8, 4, 2]),
        ("cam", "cam_merge_gate", "off", False),
        ("cam", "cam_merge", "none", "none"),
        ("rocketkv", "eviction_storage", "affine4", "affine4"),
        ("qfilters", "qfilters_on_low_retention", "raise", "raise"),
    ],
)
def test_text_becomes_a_typed_value(method: str, name: str, text: str, value: Any) -> None:
    parsed = parse_setting(method, name, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("method", "name", "text", "says"),
    [
        ("kivi", "kivi_group_size", "big", "a whole number"),
        ("kivi", "kivi_group_size", "", "a whole number"),
        ("kivi", "kivi_group_size", "3.5", "a whole number"),
        ("svdq", "svdq_energy_threshold", "nan", "a number"),
        ("cam", "cam_merge_gate", "maybe", "true or false"),
        ("qfilters", "qfilters_on_low_retention", "cry", "one of warn, raise, ignore"),
        ("a2ats", "a2ats_codebook", "x", "from Python"),
        ("kivi", "snap_budget", "3", "it has: kivi_group_size, bit_width_inlier, residual_length"),
        ("fp16", "seed", "3", "it has: none"),
        ("kivi", "method", "h2o", "no setting 'method'"),
        ("kivi", "store", "x", "no setting 'store'"),
        ("h2o", "eviction_storage", "zip", "one of exact, affine8, affine4"),
        ("kivi", "eviction_storage", "exact", "no setting 'eviction_storage'"),
    ],
)
def test_what_is_no_value_is_refused_with_what_is(
    method: str, name: str, text: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        parse_setting(method, name, text)


def test_config_takes_options_and_common_fields() -> None:
    config = config_of("kivi", {"kivi_group_size": 64, "residual_length": 64}, head_dim=80)
    assert (config.method, config.head_dim) == ("kivi", 80)
    assert (config.kivi_group_size, config.residual_length) == (64, 64)


def test_the_form_of_kept_rows_is_a_setting_like_others() -> None:
    config = config_of("snapkv", {"snap_budget": 64, "eviction_storage": "turboquant3"})
    assert (config.snap_budget, config.eviction_storage) == (64, "turboquant3")
    assert "one of exact" in refusal("snapkv", {"eviction_storage": "zip"})


def test_a_tuple_that_became_a_list_on_the_wire_is_a_tuple_again() -> None:
    config = config_of("svdq", {"svdq_bit_schedule": [4, 2]})
    assert config.svdq_bit_schedule == (4, 2)


def test_config_refuses_foreign_fields_and_impossible_values() -> None:
    with pytest.raises(SettingsError, match="no setting 'snap_budget'"):
        config_of("kivi", {"snap_budget": 3})
    with pytest.raises(QuantizerConfigError, match="kivi_group_size=3"):
        config_of("kivi", {"kivi_group_size": 3})
    assert "snap_budget" in refusal("snapkv", {"snap_budget": 1})
    assert refusal("snapkv", {"snap_budget": 1024}) == ""


@pytest.mark.parametrize("method", [row.name for row in TABLE.values() if row.is_ready])
def test_the_defaults_of_every_ready_method_work(method: str) -> None:
    assert refusal(method, {}) == ""
