"""Evicting caches whose budget depends on the layer they serve."""

from dataclasses import replace
from typing import Any

from veloxquant.cache.evicting import EvictingCache


class LayerBudgetCache(EvictingCache):
    """A budget that is part of the state: what was begun under it goes on under it."""

    @property
    def layer_budget(self) -> int:
        """Rows that this layer keeps."""
        return self.policy.budget

    def extra_state(self) -> list[Any]:
        """The budget besides what every evicting cache saves."""
        return [*super().extra_state(), self.policy.budget]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        super().restore_extra(saved[:-1])
        self.policy = replace(self.policy, budget=int(saved[-1]))
