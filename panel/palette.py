"""The command palette, made safe against keys that come before it has anything to show."""

from textual.command import CommandList, CommandPalette


class Palette(CommandPalette):
    """Textual's palette; page keys on an empty or unseen list do nothing instead of failing."""

    def _action_command_list(self, action: str) -> None:
        listed = self.query_one(CommandList)
        if listed.option_count and listed.size.height and listed.display:
            super()._action_command_list(action)
