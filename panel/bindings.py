"""Every key of the panel, once: id `area.verb`, key, what it says, where it acts."""

from typing import NamedTuple

from textual.binding import Binding


class Key(NamedTuple):
    """One action. `show` is its rank in the key bar (0: only in help and palette)."""

    id: str
    keys: str
    label: str
    help: str
    show: int = 0
    priority: bool = False

    @property
    def area(self) -> str:
        """The area it belongs to: the part of the id before the dot."""
        return self.id.split(".", 1)[0]

    @property
    def action(self) -> str:
        """The action it runs; global ones live on the app."""
        verb = self.id.split(".", 1)[1]
        return f"app.{verb}" if self.area == "app" else verb


AREAS: tuple[tuple[str, str, str], ...] = (
    ("models", "1", "Models"),
    ("fit", "2", "Fit"),
    ("run", "3", "Run"),
    ("chat", "4", "Chat"),
    ("logs", "5", "Logs"),
    ("profile", "6", "Profile"),
    ("settings", "7", "Settings"),
)

KEYS: tuple[Key, ...] = (
    *(Key(f"app.go_{name}", f"{digit},f{digit}", title, f"go to {title}")
      for name, digit, title in AREAS),
    Key("app.keys", "question_mark", "keys", "show all keys of this screen"),
    Key("app.palette", "ctrl+p", "palette", "find any action by name", priority=True),
    Key("app.leave", "ctrl+q", "quit", "close the panel; asks what to do with the server",
        priority=True),
    Key("app.first_look", "f12", "first look", "check this machine and propose a start"),
    # first look
    Key("first.start", "enter", "start it", "start the proposed model and method", 1),
    Key("first.pick", "p", "pick", "pick another model", 2),
    Key("first.demo", "d", "get demo model", "fetch the small demo model", 3),
    Key("first.again", "r", "check again", "run the checks again", 4),
    Key("first.skip", "escape", "skip", "go to the models", 5),
    # models
    Key("models.fit", "enter", "what fits", "show what fits for this model", 1),
    Key("models.start", "S", "start now", "start this model with the best method", 2),
    Key("models.filter", "slash", "filter", "filter by name", 3),
    Key("models.sort", "o", "sort", "sort by the next column", 4),
    Key("models.demo", "d", "get demo", "fetch the small demo model", 5),
    Key("models.rescan", "r", "rescan", "look for models again", 6),
    Key("models.copy", "y", "copy path", "copy the model's folder", 0),
    Key("models.clear", "escape", "clear", "leave and clear the filter"),
    # fit
    Key("fit.start", "enter", "start", "start with this method", 1),
    Key("fit.more_context", "plus,equals_sign", "more", "double the context", 2),
    Key("fit.less_context", "minus", "less", "halve the context", 3),
    Key("fit.type_context", "c", "type", "type the context in tokens", 4),
    Key("fit.settings", "s", "tune", "settings of this method, such as its bits", 6),
    Key("fit.batch", "b", "batch", "next batch size: 1, 2, 4, 8, 16", 5),
    Key("fit.why", "v", "all", "show methods that are not built yet, and why", 7),
    Key("fit.refresh", "r", "refresh", "measure the free memory again", 8),
    Key("fit.back", "escape", "models", "back to the models"),
    # run
    Key("run.stop", "x", "stop", "stop the server", 1),
    Key("run.restart", "r", "restart", "restart with the same settings", 2),
    Key("run.copy_url", "y", "copy url", "copy the address for OpenAI clients", 3),
    Key("run.pause", "space", "pause view", "freeze the gauges; the server goes on", 4),
    Key("run.logs", "l", "logs", "all logs", 5),
    Key("run.choose", "enter", "do it", "do the chosen next step", 6),
    Key("run.next_port", "n", "next port", "start on the next free port", 0),
    Key("run.other_model", "m", "other model", "pick another model", 0),
    Key("run.other_method", "f", "other method", "pick another method", 0),
    Key("run.demo", "d", "get demo model", "fetch the small demo model", 0),
    Key("run.report", "Y", "copy report", "copy what went wrong, without paths", 0),
    # chat
    Key("chat.stop", "escape", "leave / stop", "leave the text field; again: stop the answer", 1),
    Key("chat.new", "ctrl+n", "new chat", "begin a new conversation", 2, True),
    Key("chat.copy", "ctrl+y", "copy answer", "copy the last answer", 3, True),
    Key("chat.retry", "ctrl+r", "retry", "ask the last question again", 4, True),
    Key("chat.write", "i,enter,slash", "write", "go to the text field", 0),
    # logs
    Key("logs.filter", "slash", "filter", "show lines that contain a text", 1),
    Key("logs.level", "v", "level", "next lowest level: debug, info, warning, error", 2),
    Key("logs.follow", "G,f", "follow", "follow the newest line", 3),
    Key("logs.pause", "space", "pause", "stop following and count new lines", 4),
    Key("logs.wrap", "w", "wrap", "wrap long lines or cut them", 5),
    Key("logs.export", "e", "export", "write the shown lines to a file", 6),
    Key("logs.copy", "y", "copy", "copy the line under the cursor", 7),
    Key("logs.top", "g", "top", "go to the oldest line", 0),
    Key("logs.clear", "escape", "clear", "leave and clear the filter"),
    # profile
    Key("profile.sort", "o", "sort", "sort by the next column", 1),
    Key("profile.export", "e", "export", "write the table to a file", 2),
    # settings
    Key("settings.copy", "y", "copy path", "copy the path of the settings file", 1),
    Key("settings.refresh", "r", "read again", "read the settings file again", 2),
)  # fmt: skip

BY_ID: dict[str, Key] = {key.id: key for key in KEYS}


def of(area: str) -> list[Binding]:
    """The bindings of one area, for a `BINDINGS` class variable."""
    return [
        Binding(
            key.keys,
            key.action,
            key.label,
            show=bool(key.show),
            priority=key.priority,
            id=key.id,
            tooltip=key.help,
        )
        for key in KEYS
        if key.area == area
    ]


def name_of(keys: str) -> str:
    """A key as it is printed: `^q`, `/`, `+`."""
    first = keys.split(",")[0]
    named = {
        "question_mark": "?",
        "slash": "/",
        "plus": "+",
        "minus": "-",
        "escape": "esc",
        "equals_sign": "=",
    }
    return named.get(first, first.replace("ctrl+", "^"))
