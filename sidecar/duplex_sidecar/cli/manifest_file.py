"""A manifest as a file of this machine."""

from pathlib import Path

from duplex_api.manifest import ManifestError, load_manifest
from duplex_api.problems import Problem
from duplex_api.yaml_text import MAX_TEXT_BYTES


def read_manifest(path: Path) -> str:
    """The text of a file that holds one DuplexSession. Raises ManifestError and OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ManifestError([Problem("", "is too long", f"up to {MAX_TEXT_BYTES:,} bytes")])
    try:
        manifest = data.decode()
    except UnicodeDecodeError:
        raise ManifestError([Problem("", "is no text", "YAML or JSON")]) from None
    load_manifest(manifest)
    return manifest
