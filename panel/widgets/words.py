"""A text that is drawn again only when it says something else."""

from textual.content import Content
from textual.visual import VisualType
from textual.widgets import Static


class Words(Static):
    """A `Static` for text that is set many times a second and seldom changes."""

    _said: Content | None = None

    def update(self, content: VisualType = "", *, layout: bool = True) -> None:
        """Take the new text; a line of fixed height needs no new layout."""
        if isinstance(content, Content):
            if self._said is not None and self._said.is_same(content):
                return
            self._said = content
        else:
            self._said = None
        super().update(content, layout=layout and not self.has_class("line"))
