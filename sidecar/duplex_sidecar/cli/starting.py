"""What a verb shows while what it needs is made and started, which takes half a minute and more."""

import time
from pathlib import Path

from rich.console import Console

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.client.local_sidecar import LocalSidecar


def make_checkpoint(console: Console, path: Path) -> None:
    """The tiny one, once; the same one again is recognised."""
    from duplex_sidecar.checkpoint.tiny import make_tiny

    began = time.monotonic()
    if not console.is_terminal and not path.exists():  # where nothing turns meanwhile
        console.print("making the tiny checkpoint (once): about a minute", highlight=False)
    with console.status("making the tiny checkpoint (once)"):
        made = make_tiny(path, cache_dir=default_cache_dir())
    if made:
        seconds = time.monotonic() - began
        console.print(f"checkpoint made in {seconds:.0f} s: {path}", highlight=False)


def show_start(console: Console, sidecar: LocalSidecar, name: str) -> None:
    """Of a sidecar that was just started, until it is ready. Raises SidecarFailed."""
    console.print(f"starting {name}: half a minute to a minute", highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            seconds = sidecar.wait_ready(lambda text: status.update(f"starting: {text}"))
    else:
        seconds = sidecar.wait_ready()
    console.print(
        f"{name} ready in {seconds:.0f} s, {sidecar.base_url}/statusz",
        highlight=False,
    )
