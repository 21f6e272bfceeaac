"""Planned figures and widths match the method table."""

import pytest

from veloxquant.benchmarks.planned import (
    EXPECTED_WORSE,
    PLAIN,
    PUBLISHED,
    SLOW_ENCODERS,
    WIDTHS,
    chosen,
    quantising,
    settings_of,
)
from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import KVCacheConfig

NAMES = [row.name for row in quantising()]


def test_every_ready_method_that_keeps_all_tokens_is_there_and_no_other() -> None:
    for row in TABLE.values():
        if row.is_ready and row.kind == "quantization":
            assert row.name in NAMES
        if not row.is_ready or row.trim == "until_evicted":
            assert row.name not in NAMES
    assert {"kivi_sink", "a2ats"} <= set(NAMES)
    assert not {"fp16", "snapkv"} & set(NAMES)


@pytest.mark.parametrize("table", [PUBLISHED, WIDTHS, EXPECTED_WORSE, PLAIN, SLOW_ENCODERS])
def test_tables_name_methods_that_exist(table: object) -> None:
    assert set(table) <= set(TABLE)  # type: ignore[call-overload]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_every_width_is_a_configuration_that_the_method_takes(name: str, dim: int) -> None:
    settings = settings_of(name, dim, quick=False)
    for _, _, config in settings:
        TABLE[name].check(config)
    assert [default for _, default, _ in settings].count(True) == 1
    (base,) = (config for _, default, config in settings if default)
    assert base == KVCacheConfig(method=name).with_fields(head_dim=dim)
    widths = [width for width, _, _ in settings if width is not None]
    assert widths == list(WIDTHS[name].bits if name in WIDTHS else [])
    for _, default, config in settings:
        assert (config == base) == default


@pytest.mark.parametrize("name", sorted(set(NAMES) & set(WIDTHS)))
def test_more_bits_take_more_bytes(name: str) -> None:
    from veloxquant.cache.table import held
    from veloxquant.quantizers.sizes import LayerShape

    shape = LayerShape(32, 8, 128, 128)
    ladder = [
        held(config, shape, 4096).nbytes
        for width, _, config in settings_of(name, 128, quick=False)
        if width is not None
    ]
    assert ladder == sorted(set(ladder))


def test_a_quick_run_has_the_defaults_and_four_bits() -> None:
    assert [(w, d) for w, d, _ in settings_of("kivi", 64, quick=True)] == [(2, True), (4, False)]
    assert [(w, d) for w, d, _ in settings_of("adakv", 64, quick=True)] == [
        (None, True), (4, False)
    ]  # fmt: skip


def test_a_budget_of_a_row_grows_with_the_head() -> None:
    assert WIDTHS["kvtc"].settings(3, 64) == {"kvtc_bit_budget": 192}
    assert WIDTHS["kitty"].settings(4, 64) == {"kitty_lo_bit": 4, "kitty_hi_bit": 8}
    assert WIDTHS["vecinfer"].settings(3, 64)["key_codebook_bits"] == 6


def test_a_selection_keeps_its_order_and_unknown_names_are_refused() -> None:
    assert [row.name for row in chosen(("kivi", "adakv"))] == ["kivi", "adakv"]
    with pytest.raises(ValueError, match=r"snapkv.*ready: .*kivi"):
        chosen(("kivi", "snapkv"))
