"""`duplex`: the command line. One file a verb; each is imported only when it is called."""

import sys
from importlib.metadata import version

from cyclopts import App
from rich.console import Console

from duplex_sidecar.cli.inputs import complaint

app = App(
    name="duplex",
    help="Live two-way speech conversations with an omni model.",
    version=lambda: version("duplex"),
    error_formatter=complaint,
    error_console=Console(stderr=True, soft_wrap=True),
)
for _verb, _where, _help in (
    ("demo", "demo:demo", "A conversation on this machine, with a kill in the middle."),
    ("run", "run:run", "One conversation from a manifest and a recording."),
    ("serve", "serve:serve", "The sidecar alone, until it is told to stop."),
    ("doctor", "doctor:doctor", "What is present, what is missing, how to fix it."),
    ("checkpoint", "checkpoint:app", "Make a checkpoint to try things with, or look at one."),
    ("voice", "voice:app", "Make a voice file of a recording, or look at one."),
    ("contract", "contract:app", "Check the model's rules against recorded cases."),
    ("ledger", "ledger:app", "Look at, carry or erase the ledgers of sessions."),
    ("history", "history:app", "Judge what outside observers saw of conversations."),
):
    app.command(f"duplex_sidecar.cli.{_where}", name=_verb, help=_help)


def main() -> None:
    """Entry point. The exit status of a verb is what it returns (None = 0)."""
    sys.exit(app())


if __name__ == "__main__":
    main()
