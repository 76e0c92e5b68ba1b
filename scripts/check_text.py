"""Looks through every file of the project for what must not stand in it.

Words: the spelling of our public words, one for each idea (docs/architecture.md has the table).
Places: paths of a machine, names of package or image registries.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK_FILE = "uv.lock"
TEXT_SUFFIXES = frozenset(
    (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".lua", ".json", ".txt", ".tpl", ".ini", "")
)

# Wrong spelling (a regular expression, matched inside names too) -> the word to use.
WORDS = {
    r"\bre[_-]prefill|RePrefill": "reprefill",
    r"[Dd]uplex[ _-]?[Ss]ession[ _-]?(?:CRD|CR)\b": "DuplexSession",
    r"\bDuplexSessions\b": "DuplexSession",
    r"\bDuplexPools\b": "DuplexPool",
    r"\bduplex[-_]sessions\b": "duplexsessions",
    r"\bduplex[-_]pools\b": "duplexpools",
    r"code_?(?:to|two)_?wav|code_2_wav|codec2wav": "code2wav",
    r"mini_?cpm_?o_45|mini_cpm|minicpm_o45": "minicpmo45",
    r"side_car|side-car\b": "sidecar",
    r"gate_way": "gateway",
    r"bargein": "barge_in",
    r"check_point": "checkpoint",
    r"fenc(?:e|ing)_token": "fence",
    r"hibernat": "parked",
    r"spectogram": "spectrogram",
    r"web_socket": "websocket",
    r"stage_?two_epoch|stage2epoch": "stage2_epoch",
}

# Written with a bracket in each, so that this file does not find itself.
PLACES = {
    r"(?<![\w.$}])/(?:wor[k]|roo[t]|hom[e]/[a-z]+|tm[p])/": "a path of one machine",
    r"\bpyp[i]\.org|pythonhoste[d]\.org|npmj[s]\.(?:org|com)|crate[s]\.io": "a registry",
    r"prox[y]\.golang|mave[n]\.org|de[b]\.debian|huggingfac[e]\.co": "a registry",
    r"docke[r]\.io|ghc[r]\.io|qua[y]\.io|gc[r]\.io|registr[y]\.k8s": "a registry",
}


def complaints(name: str, text: str) -> Iterator[str]:
    """What is wrong with one file, one sentence each."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, what in _PLACES:
            found = pattern.search(line)
            if found:
                yield f"{name}:{number}: {found[0]!r} is {what}"
        if name == _THIS_FILE:
            continue
        for pattern, word in _WORDS:
            found = pattern.search(line)
            if found:
                yield f"{name}:{number}: {found[0]!r}: the word is {word!r}"


_PLACES = tuple((re.compile(pattern), what) for pattern, what in PLACES.items())
_WORDS = tuple((re.compile(pattern), word) for pattern, word in WORDS.items())
_THIS_FILE = "scripts/check_text.py"


def project_files() -> list[str]:
    """Files that are, or would be, in the repository."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if name != LOCK_FILE and (ROOT / name).is_file()]


def main() -> int:
    found = [
        complaint
        for name in project_files()
        if Path(name).suffix in TEXT_SUFFIXES
        for complaint in complaints(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
