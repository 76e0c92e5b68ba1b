"""The Lua that runs in the server: one file a script, with `prelude.lua` in front of each."""

import hashlib
from functools import cache
from importlib.resources import files

from duplex_sidecar.ledger.call import ScriptName


@cache
def source(name: ScriptName) -> str:
    """The script as sent. A first line `#!lua flags=...` stays the first line."""
    folder = files(__name__)
    prelude = folder.joinpath("prelude.lua").read_text()
    body = folder.joinpath(f"{name}.lua").read_text()
    if not body.startswith("#!"):
        return f"{prelude}\n{body}"
    flags, rest = body.split("\n", 1)
    return f"{flags}\n{prelude}\n{rest}"


@cache
def sha1(name: ScriptName) -> str:
    """What EVALSHA names it by."""
    return hashlib.sha1(source(name).encode()).hexdigest()
