"""What operators switched: drained names, and where shadow work is paused.

Switches are about names, not lives: an instance that restarts under a drained or paused name is drained or paused
again. Only known names are ever taken in, so that these sets cannot outgrow the registry.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Switches:
    drained: set[str] = field(default_factory=set)
    paused_instances: set[str] = field(default_factory=set)
    paused_models: set[str] = field(default_factory=set)
    cluster_paused: bool = False

    def pauses_model(self, model: str) -> bool:
        """Whether the model does no shadow work anywhere."""
        return self.cluster_paused or model in self.paused_models

    def pauses(self, name: str, model: str) -> bool:
        """Whether the instance does no shadow work."""
        return self.pauses_model(model) or name in self.paused_instances

    def keep_only(self, instances: set[str], models: set[str]) -> None:
        """Drop what is about names that are no longer known."""
        self.drained &= instances
        self.paused_instances &= instances
        self.paused_models &= models


def switch(names: set[str], name: str, *, on: bool) -> bool:
    """Put a name in, or take it out; True if that changed anything."""
    changed = on != (name in names)
    (names.add if on else names.discard)(name)
    return changed
