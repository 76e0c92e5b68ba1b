"""Meeting point, inside the engine core, of hidden rows and the requests that they belong to.

`compute_logits` of the model sees the rows but not the requests; the logits processor sees the
requests, in the same row order, but not the rows. vLLM builds both and hands neither to the other,
hence one object per process. Order within a step of the V1 runner: forward (maybe a captured
graph), `compute_logits`, logits processors, sampling; all but the forward are eager.
"""

import torch


class HiddenTap:
    """Holds the rows of the step being sampled."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def offer(self, rows: torch.Tensor) -> None:
        """Model side: rows [requests, hidden] about to be turned into logits."""
        self._rows = rows

    def take(self) -> torch.Tensor | None:
        """Processor side: the rows of this step, once."""
        rows, self._rows = self._rows, None
        return rows


TAP = HiddenTap()
