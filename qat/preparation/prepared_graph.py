"""`PreparedGraph`: a graph module that keeps its notes and plain attributes when it is copied."""

import copy
from typing import Any

from torch import fx


class PreparedGraph(fx.GraphModule):
    """An fx.GraphModule whose own attributes (what was left in float, `backbone.out_channels`) survive deepcopy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "PreparedGraph":
        twin: Any = super().__deepcopy__(memo)
        for key, value in vars(self).items():
            if key not in vars(twin) and not key.startswith("_"):
                setattr(twin, key, copy.deepcopy(value, memo))
        same: PreparedGraph = twin
        return same
