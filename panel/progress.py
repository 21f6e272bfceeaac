"""A fetch that runs: how far it is, and how to draw it."""

from dataclasses import dataclass

from textual.content import Content

from veloxquant.panel import units
from veloxquant.panel.text import clean
from veloxquant.panel.theme import GLYPHS

STALLED_AFTER = 15.0
_BAR = 30


@dataclass(frozen=True, slots=True)
class Fetching:
    """Progress of the demo model: bytes done of total, when they last moved, or what failed."""

    what: str
    step: str = "starting"
    done: int = 0
    total: int | None = None
    speed: float = 0.0
    idle_s: float = 0.0
    problem: str = ""
    hint: str = ""

    def content(self) -> Content:
        """Title, bar, words."""
        if self.problem:
            return Content.assemble(
                (f"{clean(self.what)} could not be fetched\n", "bold $state-failed"),
                (f"{clean(self.problem, 400)}\n", ""),
                (clean(self.hint, 400), "$muted"),
            )
        parts: list[tuple[str, str]] = [(f"{clean(self.what)}\n", "bold"), (clean(self.step), "")]
        if self.total:
            full = round(_BAR * min(1.0, self.done / self.total))
            parts += [
                ("\n", ""),
                (GLYPHS.full * full, "$state-busy"),
                (GLYPHS.empty * (_BAR - full), "$faint"),
                (f"  {units.pair(self.done, self.total)}", "bold"),
                (f"  {units.short_size(self.speed)}/s" if self.speed else "", "$muted"),
            ]
        if self.idle_s >= STALLED_AFTER:
            parts.append((f"\nno bytes for {self.idle_s:.0f} s; it is tried again", "$state-warn"))
        return Content.assemble(*parts)
