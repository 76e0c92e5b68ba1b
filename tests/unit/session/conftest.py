"""Makes the fakes importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
