"""Finds functions, classes, methods and properties of the product that nothing of it uses.

Tests do not count as use. What a framework calls by name stands in dead_code_allowed.txt, one name
a line with the reason; a line that is no longer needed is an error too.
Fields of structs and models are left out: they are data, read on the other side of a wire.
"""

import re
import sys
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
SCANNED = ("crds", "operator", "sidecar", "scripts")
ALLOWED_FILE = ROOT / "scripts" / "dead_code_allowed.txt"
KINDS = frozenset(("function", "class", "method", "property", "import", "unreachable_code"))
CALLED_BY_DECORATOR = (
    "@*.command",
    "@*.default",
    "@*.get",
    "@*.post",
    "@*.put",
    "@*.delete",
    "@*.websocket",
    "@*.exception_handler",
    "@*.middleware",
    "@model_validator*",
    "@field_validator*",
)
_ENTRY_POINT = re.compile(r"""["'][A-Za-z_][\w.]*:([A-Za-z_]\w*)["']""")


def entry_points() -> set[str]:
    """Names reached as "module:name": scripts, plugins, lazily loaded verbs of the command line."""
    files = [ROOT / "pyproject.toml", *(ROOT / "sidecar").rglob("*.py")]
    return {
        name for file in files for name in _ENTRY_POINT.findall(file.read_text(encoding="utf-8"))
    }


def allowed_names() -> set[str]:
    lines = ALLOWED_FILE.read_text(encoding="utf-8").splitlines()
    names = (line.partition("#")[0].strip() for line in lines)
    return {name for name in names if name}


def main() -> int:
    vulture = Vulture(ignore_decorators=list(CALLED_BY_DECORATOR))
    vulture.scavenge([str(ROOT / folder) for folder in SCANNED])
    allowed, known = allowed_names(), entry_points()
    unused = [item for item in vulture.get_unused_code() if item.typ in KINDS]
    used_allowances = {item.name for item in unused} & allowed
    found = [
        f"{Path(item.filename).relative_to(ROOT)}:{item.first_lineno}: {item.message}"
        for item in unused
        if item.name not in allowed | known
    ]
    found += [
        f"{ALLOWED_FILE.relative_to(ROOT)}: {name} is used or gone; remove the line"
        for name in sorted(allowed - used_allowances)
    ]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
