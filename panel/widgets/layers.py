"""Bytes by layer: held against what would be held uncompressed."""

from textual.content import Content

from veloxquant.panel import units
from veloxquant.panel.state import View
from veloxquant.panel.text import fit, pad
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.pane import Pane
from veloxquant.supervisor.messages import LayerRow


def format_words(row: LayerRow) -> str:
    """The form of a layer's rows; that of the baseline is the model's own, of whatever bits."""
    return "uncompressed" if row.kind == "plain" else row.format


def layer_line(row: LayerRow, cells: int, widest: int) -> Content:
    """`  0 4b/4b ████····  8.6 M of 32.0 M  3.7x` in `cells` columns."""
    ratio = f"{row.fp16 / row.resident:.1f}x" if row.resident else "-"
    tail = f" {units.short_size(row.resident):>7} of {units.short_size(row.fp16):>7} {ratio:>6}"
    head = f"{row.index:>3} {pad(fit(format_words(row), 15), 15)} "
    room = max(4, cells - len(head) - len(tail))
    full = round(room * row.fp16 / widest) if widest else 0
    held = min(room, round(room * row.resident / widest)) if widest else 0
    return Content.assemble(
        (head, "$muted"),
        (GLYPHS.full * held, "$mem-kv"),
        (GLYPHS.empty * max(0, full - held), "$faint"),
        " " * max(0, room - max(full, held)),
        tail,
    )


class LayerPane(Pane):
    """The first layers; the Profile area has all of them."""

    TITLE = "LAYERS  held, of what is uncompressed"

    def basis(self, view: View) -> object:
        """The profile alone."""
        return view.profile

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """A line a layer, and how many more there are."""
        if view.profile is None or not view.profile.layers:
            return [Content.styled("by layer: with the first request", "$muted")]
        layers = view.profile.layers
        widest = max(max(row.fp16, row.resident) for row in layers)
        shown = layers if len(layers) <= rows else layers[: rows - 1]
        out = [layer_line(row, cells, widest) for row in shown]
        if len(shown) < len(layers):
            out.append(Content.styled(f"    {len(layers) - len(shown)} more: press 6", "$muted"))
        return out
