"""What can go wrong with a checkpoint folder, told before any stage starts."""

from enum import StrEnum


class CheckpointFault(StrEnum):
    """Kinds of checkpoint failure. Callers decide by the kind, never by the text."""

    MISSING = "missing"
    """The folder or one of its files is not there."""
    UNREADABLE = "unreadable"
    """A file is there but cannot be opened (permission, damaged header)."""
    INVALID_CONFIG = "invalid_config"
    """config.json lacks a field, or a field has a wrong type or value."""
    INVALID_TOKENIZER = "invalid_tokenizer"
    """tokenizer.json is no byte-level BPE, or a required control token is missing."""
    INVALID_VOICE = "invalid_voice"
    """A voice file lacks a tensor, or one has another shape."""
    SHAPE_MISMATCH = "shape_mismatch"
    """Tensors are missing, unexpected or mis-shaped; the report lists all of them."""
    NOT_WRITABLE = "not_writable"
    """The folder cannot be written (permission, read-only file system, a file in the way)."""
    DISK_FULL = "disk_full"
    """No space is left while writing. What was written has been removed."""
    FIT_FAILED = "fit_failed"
    """The fitted readout does not behave as it must on the recording."""


class CheckpointError(Exception):
    """A checkpoint operation failed. `fault` and `path` are for decisions, `reason` for people."""

    def __init__(self, fault: CheckpointFault, path: str, reason: str) -> None:
        super().__init__(f"{path}: {fault}: {reason}")
        self.fault = fault
        self.path = path
        self.reason = reason
