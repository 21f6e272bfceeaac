"""The palette: every action of the key table, found by name, run wherever the user is."""

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from veloxquant.panel.bindings import AREAS, KEYS, Key, name_of

_TITLES = {name: title for name, _, title in AREAS} | {"first": "First look"}


def entries() -> list[tuple[str, Key]]:
    """What the palette says for each action: area, words, key."""
    return [
        (f"{_TITLES[key.area]}: {key.help}" if key.area != "app" else key.help, key) for key in KEYS
    ]


class ActionProvider(Provider):
    """Offers the actions of the area in front first, then all."""

    async def discover(self) -> Hits:
        """What the palette shows before anything is typed."""
        here = getattr(self.app, "current_mode", "")
        for words, key in sorted(entries(), key=lambda entry: entry[1].area != here):
            if key.area in (here, "app"):
                yield DiscoveryHit(
                    Content(words), self._run(key), text=words, help=f"key {name_of(key.keys)}"
                )

    async def search(self, query: str) -> Hits:
        """Actions whose words fit."""
        matcher = self.matcher(query)
        for words, key in entries():
            if (score := matcher.match(words)) > 0:
                yield Hit(
                    score, matcher.highlight(words), self._run(key), text=words,
                    help=f"key {name_of(key.keys)}",
                )  # fmt: skip

    def _run(self, key: Key):
        app = self.app

        async def act() -> None:
            if key.area == "app":
                await app.run_action(key.action)
                return
            if app.current_mode != key.area:
                await app.switch_mode(key.area)
            screen = app.screen
            if screen.check_action(key.action, ()) is not False:
                await app.run_action(f"screen.{key.action}")

        return act
