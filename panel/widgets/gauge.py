"""Where the memory is: a stacked bar with the limit, and claimed against held bytes."""

from textual.content import Content

from veloxquant.panel import units
from veloxquant.panel.state import GAP_WARN, View, kv_gap, kv_held
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.chart import sparkline
from veloxquant.panel.widgets.pane import Pane
from veloxquant.supervisor.messages import Stats

Part = tuple[int, str, str]


def bar(parts: list[Part], limit: int, cells: int, scale: int | None = None) -> Content:
    """A stacked bar of (bytes, glyph, style) parts over `cells` columns, with a mark at `limit`.

    Parts above zero take at least one cell, so that nothing present is invisible. `scale` is the
    byte count of the whole width; default a little more than limit and parts need.
    """
    total = sum(part[0] for part in parts)
    whole = scale or max(round(limit * 1.04), total, 1)
    out: list[tuple[str, str]] = []
    used, carried = 0, 0
    for count, glyph, style in parts:
        if count <= 0:
            continue
        carried += count
        end = min(cells, max(used + 1, round(cells * carried / whole)))
        if end > used:
            out.append((glyph * (end - used), style))
            used = end
    out.append((GLYPHS.free * (cells - used), "$mem-free"))
    line = Content.assemble(*out)
    at = round(cells * limit / whole)
    if limit > 0 and at < cells:
        over = "$state-failed" if total > limit else "$ink"
        line = line[:at] + Content.styled(GLYPHS.limit, f"bold {over}") + line[at + 1 :]
    return line


def memory_parts(stats: Stats) -> list[Part]:
    """Weights, held KV and everything else, from the footprint down."""
    held = kv_held(stats)
    other = max(0, stats.footprint - stats.weights - held)
    return [
        (stats.weights, GLYPHS.weights, "$mem-weights"),
        (held, GLYPHS.kv, "$mem-kv"),
        (other, GLYPHS.other, "$mem-other"),
    ]


class MemoryPane(Pane):
    """Footprint, its parts, the limit, and whether the cache holds what it claims."""

    TITLE = "MEMORY"

    def basis(self, view: View) -> object:
        """Bytes and their history; not what else the worker counts."""
        s = view.stats
        if s is None:
            return None
        now = (s.footprint, s.weights, s.kv_claimed, s.kv_resident, s.kv_fp16, s.limit)
        return now, view.history

    def note(self, view: View) -> str:
        """Room left below the limit."""
        stats = view.stats
        if stats is None or not stats.limit:
            return ""
        left = stats.limit - stats.footprint
        return f"{units.size(left)} left" if left >= 0 else f"{units.size(-left)} over the limit"

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Words, bar, truth; with more rows a legend and the last minutes."""
        stats = view.stats
        if stats is None:
            return [Content.styled("waiting for the first figures", "$muted")]
        parts = memory_parts(stats)
        names = ("weights", "kv", "other")
        words = [Content.assemble(("footprint ", "$muted"), (units.size(stats.footprint), "bold"))]
        for name, (count, glyph, style) in zip(names, parts, strict=True):
            words.append(
                Content.assemble((f"{glyph} ", style), (f"{name} ", "$muted"), units.size(count))
            )
        if stats.limit:
            words.append(Content.assemble(("limit ", "$muted"), units.size(stats.limit)))
        out = flow(words, cells)
        out.append(bar(parts, stats.limit, cells))
        out += flow(self._truth(stats), cells)
        spare = rows - len(out)
        if spare >= 4 and view.history:
            values = [point.footprint for point in view.history]
            span = units.ago(view.history[-1].t - view.history[0].t)
            out.append(Content.styled(f"footprint, last {span}", "$muted"))
            out += sparkline(values, cells, spare - 1, "$mem-weights", units.short_size)
        return out

    @staticmethod
    def _truth(stats: Stats) -> list[Content]:
        gap = kv_gap(stats)
        bad = gap > GAP_WARN
        words = [
            Content.assemble(("kv claimed ", "$muted"), (units.size(stats.kv_claimed), "bold")),
            Content.assemble(("held ", "$muted"), (units.size(kv_held(stats)), "bold")),
            Content.styled(
                f"gap {gap:+.0%} {'WARNING: above 15 %' if bad else 'ok'}",
                "bold $state-warn" if bad else "$state-ready",
            ),
        ]
        if stats.kv_fp16 and kv_held(stats):
            words.append(
                Content.assemble(
                    ("uncompressed ", "$muted"),
                    units.size(stats.kv_fp16),
                    (f" ({stats.kv_fp16 / stats.kv_resident:.1f}x)", "$mem-kv"),
                )
            )
        return words


def flow(words: list[Content], cells: int, gap: int = 3) -> list[Content]:
    """Words on as few lines as they need."""
    out: list[Content] = []
    for word in words:
        if out and out[-1].cell_length + gap + word.cell_length <= cells:
            out[-1] = out[-1] + Content(" " * gap) + word
        else:
            out.append(word)
    return out
