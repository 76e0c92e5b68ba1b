"""torch's layers without their random start values: ours are always assigned afterwards.

Parameters stay untouched memory until then, so building the real shapes takes no time and no room.
(The meta device would do the same, but loads a compiler's worth of modules for it.)
"""

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left as allocated."""


class LayerNorm(nn.LayerNorm):
    def reset_parameters(self) -> None:
        """Left as allocated."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Left as allocated."""


class Conv1d(nn.Conv1d):
    def reset_parameters(self) -> None:
        """Left as allocated."""


class Conv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        """Left as allocated."""
