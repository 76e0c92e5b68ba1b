"""Fitted output rows, kept by the fingerprint of what they were fitted from.

A cache is never a reason to fail: what cannot be read is fitted again, what cannot be written is
not kept.
"""

import contextlib
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from duplex_sidecar.checkpoint.behaviour import Behaviour

_ROWS = "rows"
_BEHAVIOURS = "behaviours"


class FittedReadout(NamedTuple):
    """rows: [vocabulary, hidden] float32. behaviours: what they did in each proof."""

    rows: Tensor
    behaviours: tuple[Behaviour, ...]


def fit_path(cache_dir: Path, fingerprint: str) -> Path:
    return cache_dir / f"readout-{fingerprint}.safetensors"


def read_fit(path: Path, shape: tuple[int, ...]) -> FittedReadout | None:
    """None when there is nothing of that shape."""
    try:
        # The package's class is written in Rust and has no types.
        with cast(Any, safetensors).safe_open(path, framework="pt") as file:
            rows: Tensor = file.get_tensor(_ROWS)
            behaviours = msgspec.json.decode(
                file.metadata()[_BEHAVIOURS], type=tuple[Behaviour, ...]
            )
    except (OSError, KeyError, TypeError, safetensors.SafetensorError, msgspec.MsgspecError):
        return None
    usable = tuple(rows.shape) == shape and rows.dtype == torch.float32
    return FittedReadout(rows, behaviours) if usable else None


def write_fit(path: Path, fitted: FittedReadout) -> None:
    """Appears whole or not at all."""
    behaviours = msgspec.json.encode(fitted.behaviours).decode()
    with contextlib.suppress(OSError, safetensors.SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".readout-") as scratch:
            part = Path(scratch) / path.name
            save_file({_ROWS: fitted.rows}, part, {_BEHAVIOURS: behaviours})
            part.rename(path)
