"""Drawing functions: widths, limits, squeezing, following."""

import panel_fakes as fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App

from veloxquant.panel.state import LogLine, View, fold
from veloxquant.panel.theme import ANSI, BLOCKS, DARK, GLYPHS, PLAIN, glyphs, theme_name
from veloxquant.panel.widgets.chart import nice_top, sparkline
from veloxquant.panel.widgets.chrome import state_words
from veloxquant.panel.widgets.gauge import MemoryPane, bar, flow, memory_parts
from veloxquant.panel.widgets.layers import layer_line
from veloxquant.panel.widgets.line_log import LineLog
from veloxquant.panel.widgets.pool_map import PoolPane, squeeze
from veloxquant.panel.widgets.table import Column, PickTable, Row
from veloxquant.supervisor.messages import LayerRow, State, Stats

GIB = 1 << 30


# ---- bars and charts ------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 64 * GIB), min_size=1, max_size=3),
    st.integers(0, 64 * GIB),
    st.integers(4, 200),
)
def test_a_bar_is_exactly_as_wide_as_asked(counts, limit, cells):
    parts = [(count, glyph, "") for count, glyph in zip(counts, "wko", strict=False)]
    assert bar(parts, limit, cells).cell_length == cells


def test_small_parts_are_not_invisible():
    line = bar([(4 * GIB, "w", ""), (1 << 20, "k", ""), (1 << 20, "o", "")], 12 * GIB, 40).plain
    assert line.count("k") == line.count("o") == 1


def test_the_limit_is_marked_and_passed_visibly():
    inside = bar([(6 * GIB, "w", "")], 12 * GIB, 50).plain
    over = bar([(14 * GIB, "w", "")], 12 * GIB, 50).plain
    assert inside.index(GLYPHS.limit) > inside.rindex("w")
    assert over.index(GLYPHS.limit) < over.rindex("w")


def test_memory_parts_never_go_below_zero():
    parts = memory_parts(Stats(footprint=1, weights=100, kv_resident=50, kv_claimed=50))
    assert [part[0] for part in parts] == [100, 50, 0]


@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=700), st.integers(12, 160), st.integers(1, 9)
)
def test_charts_fill_their_box(values, cells, rows):
    lines = sparkline(values, cells, rows, "", lambda value: f"{value:.0e}")
    assert len(lines) == rows
    assert {line.cell_length for line in lines} == {lines[0].cell_length}


def test_scales_are_round():
    assert [nice_top(v) for v in (0, 0.3, 1, 3, 41.3, 51)] == [1, 0.5, 1, 5, 50, 100]


def test_flow_uses_as_few_lines_as_fit():
    from textual.content import Content

    words = [Content("aaaa"), Content("bbbb"), Content("cccc")]
    assert [line.plain for line in flow(words, 11)] == ["aaaa   bbbb", "cccc"]


# ---- pool -----------------------------------------------------------------------------------

RUNS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from("#*.?"), st.integers(0, 9)), max_size=20
)


@given(RUNS, st.integers(1, 400), st.integers(1, 120))
def test_squeezed_pool_shows_every_block_once(runs, blocks, room):
    per, cells = squeeze(runs, blocks, room)
    assert len(cells) == -(-blocks // per)
    assert len(cells) <= room


def test_full_means_all_full():
    per, cells = squeeze([(2, "#", 1), (1, "#", 1), (1, ".", 0)], 4, 2)
    assert per == 2
    assert cells == [("#", 1), ("*", 1)]


def test_pool_fits_its_rows():
    pane, view = PoolPane(), fold(View(), fakes.serving(3), 0.0)
    for rows in (2, 3, 5, 9):
        lines = pane.lines(view, 100, rows)
        assert len(lines) <= rows
        assert "1,280 blocks" in lines[0].plain


# ---- memory ---------------------------------------------------------------------------------


def memory_text(stats):
    view = fold(View(), [fakes.snapshot(fakes.READY, stats=stats)], 0.0)
    return "\n".join(line.plain for line in MemoryPane().lines(view, 120, 6))


def test_a_gap_above_15_percent_is_a_warning_in_words():
    fine = Stats(footprint=GIB, kv_claimed=100 << 20, kv_resident=110 << 20)
    lie = Stats(footprint=GIB, kv_claimed=100 << 20, kv_resident=500 << 20)
    assert "gap +10% ok" in memory_text(fine)
    assert "gap +400% WARNING" in memory_text(lie)


def test_a_layer_of_the_baseline_is_not_given_a_width():
    rows = [LayerRow(0, "plain", "fp16", 8, 8), LayerRow(1, "compressed", "kivi", 8, 2)]
    told = [layer_line(row, 60, 8).plain for row in rows]
    assert "uncompressed" in told[0]
    assert "fp16" not in told[0]
    assert "kivi" in told[1]


def test_the_saving_is_named():
    assert "(4.0x)" in memory_text(Stats(kv_claimed=GIB, kv_resident=GIB, kv_fp16=4 * GIB))


# ---- state pill -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "age", "words"),
    [
        (State(phase="stopped"), 0, "no server"),
        (State(phase="loading"), 7, "LOADING 00:07"),
        (State(phase="ready"), 0, "READY"),
        (State(phase="ready"), 7, "no news for 7 s"),
        (State(phase="ready"), 12, "UNRESPONSIVE 12 s"),
        (State(phase="failed"), 0, "FAILED"),
    ],
)
def test_state_words(state, age, words):
    assert state_words(fold(View(), [fakes.snapshot(state)], 0.0), float(age))[0] == words


def test_both_palettes_name_the_same_colours():
    assert DARK.keys() == ANSI.keys()


def test_every_meaning_has_its_own_glyph():
    for g in (BLOCKS, PLAIN):
        parts = (g.weights, g.kv, g.other, g.prompt, g.free, g.limit)
        assert len(set(parts)) == len(parts)
        assert len({g.full, g.part, g.empty}) == 3
    assert all(c.isascii() for c in "".join(PLAIN))


@pytest.mark.parametrize(
    ("env", "plain"),
    [
        ({}, False),
        ({"LANG": "en_US.UTF-8"}, False),
        ({"LC_ALL": "C"}, True),
        ({"VELOXQUANT_LOOK_ASCII": "1"}, True),
    ],
)
def test_glyphs_of_a_terminal(env, plain):
    assert (glyphs(env) is PLAIN) == plain


def test_themes_of_a_terminal():
    assert theme_name({"COLORTERM": "truecolor"}) == "velox"
    assert theme_name({"TERM": "xterm-256color"}) == "ansi-dark"
    assert theme_name({"VELOXQUANT_LOOK_THEME": "nord"}) == "nord"
    assert theme_name({"VELOXQUANT_LOOK_THEME": "auto", "COLORTERM": "24bit"}) == "velox"


# ---- table ----------------------------------------------------------------------------------

COLUMNS = (
    Column("NAME", 10, 0, flex=True),
    Column("SIZE", 6, 1, right=True),
    Column("NOTE", 12, 2),
)


class OneWidget(App[None]):
    def __init__(self, widget):
        super().__init__()
        self.widget = widget

    def compose(self):
        yield self.widget

    def get_theme_variable_defaults(self):
        return DARK


def rows_of(count):
    return [Row(f"k{i}", ((f"name {i}", ""), (str(i), ""), ("note", ""))) for i in range(count)]


@pytest.mark.parametrize(
    ("width", "titles"), [(60, "NAME SIZE NOTE"), (24, "NAME SIZE"), (14, "NAME")]
)
async def test_columns_give_way_by_rank(width, titles):
    table = PickTable(COLUMNS)
    async with OneWidget(table).run_test(size=(width, 6)):
        table.set_rows(rows_of(3))
        assert " ".join(table.render().plain.split("\n")[0].split()) == titles
        assert all(cells_of(line) <= width for line in table.render().plain.split("\n"))


def cells_of(line):
    from veloxquant.panel.text import width

    return width(line)


async def test_the_cursor_stays_on_its_key_and_in_sight():
    table = PickTable(COLUMNS)
    async with OneWidget(table).run_test(size=(40, 6)) as pilot:
        table.set_rows(rows_of(30))
        table.focus()
        await pilot.press("G")
        assert table.key == "k29"
        assert "name 29" in table.render().plain
        table.set_rows(list(reversed(rows_of(30))))
        assert table.key == "k29"
        assert table.cursor == 0
        assert "name 29" in table.render().plain
        table.set_rows(rows_of(2))
        assert table.key in ("k0", "k1")
        table.set_rows([])
        assert table.key == ""


async def test_wide_names_do_not_break_the_columns():
    table = PickTable(COLUMNS)
    async with OneWidget(table).run_test(size=(40, 6)):
        table.set_rows(
            [
                Row("a", (("漢字漢字漢字漢字漢字漢字漢字", ""), ("1", ""), ("n", ""))),
                Row("b", (("plain", ""), ("2", ""), ("n", ""))),
            ]
        )
        lines = table.render().plain.split("\n")[1:]
        assert len({cells_of(line) for line in lines}) == 1


# ---- log ------------------------------------------------------------------------------------


def lines_of(count, first=1, level="info"):
    return tuple(LogLine(first + i, 0.0, level, "src", f"line {first + i}") for i in range(count))


async def test_log_follows_pauses_and_counts():
    log = LineLog()
    async with OneWidget(log).run_test(size=(60, 5)) as pilot:
        log.set_lines(lines_of(20))
        assert "line 20" in log.render().plain
        log.focus()
        await pilot.press("up")
        assert not log.following
        before = log.render().plain
        log.set_lines(lines_of(26))
        assert log.below == 6
        assert log.render().plain == before, "the reader's place does not move"
        log.following = True
        assert "line 26" in log.render().plain
        assert log.below == 0


async def test_log_filter_level_and_search_mark():
    log = LineLog()
    async with OneWidget(log).run_test(size=(60, 8)):
        log.set_lines(lines_of(5) + lines_of(2, first=6, level="error"))
        log.level = "error"
        assert [line.seq for line in log.shown] == [6, 7]
        log.level = "debug"
        log.needle = "LINE 3"
        assert [line.seq for line in log.shown] == [3]
        log.needle = "nothing like it"
        assert "no line passes the filter" in log.render().plain
        log.needle = ""
        assert len(log.shown) == 7


async def test_log_keeps_its_place_when_old_lines_fall_out():
    log = LineLog()
    async with OneWidget(log).run_test(size=(60, 5)) as pilot:
        log.set_lines(lines_of(50))
        log.focus()
        for _ in range(3):
            await pilot.press("up")
        picked = log.picked
        log.set_lines(lines_of(50, first=11))
        assert log.picked == picked
        assert len(log.shown) == 50


async def test_log_wraps_and_cuts_long_lines():
    log = LineLog()
    async with OneWidget(log).run_test(size=(60, 12)):
        log.set_lines((LogLine(1, 0.0, "info", "src", "x" * 200 + "END"),))
        assert "END" not in log.render().plain
        log.wrap = True
        assert "END" in log.render().plain.replace("\n", "").replace(" ", "")
        assert all(cells_of(line) <= 60 for line in log.render().plain.split("\n"))


async def test_log_of_many_lines_is_quick():
    import time

    log = LineLog()
    async with OneWidget(log).run_test(size=(120, 40)):
        log.set_lines(lines_of(10_000))
        started = time.process_time()
        for i in range(20):
            log.set_lines(lines_of(10_000, first=2 + i))
            log.render()
        assert time.process_time() - started < 5.0
