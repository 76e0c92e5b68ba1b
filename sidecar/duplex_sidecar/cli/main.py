"""`duplex`: the command line. One file a verb; each is imported only when it is called."""

import sys

from cyclopts import App

app = App(name="duplex", help="Live two-way speech conversations with an omni model.")
app.command("duplex_sidecar.cli.demo:demo", name="demo")
app.command("duplex_sidecar.cli.run:run", name="run")
app.command("duplex_sidecar.cli.serve:serve", name="serve")
app.command("duplex_sidecar.cli.doctor:doctor", name="doctor")
app.command("duplex_sidecar.cli.checkpoint:app", name="checkpoint")
app.command("duplex_sidecar.cli.contract:app", name="contract")
app.command("duplex_sidecar.cli.ledger:app", name="ledger")
app.command("duplex_sidecar.cli.history:app", name="history")


def main() -> None:
    """Entry point. The exit status of a verb is what it returns (None = 0)."""
    sys.exit(app())


if __name__ == "__main__":
    main()
