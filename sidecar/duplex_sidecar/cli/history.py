"""`duplex history`: judge what observers outside of the product recorded of it."""

import sys
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.markup import escape

from duplex_sidecar.cli.inputs import Count, InputFile, os_error_text
from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.observations import UnreadableHistory, decode_lines
from duplex_sidecar.history.verdict import Counts, Minimums, Report

EXIT_VIOLATED = 1
EXIT_UNREADABLE = 2

app = App(name="history", help="Judge what outside observers recorded of conversations.")


@app.command
def check(
    *files: InputFile,
    zombies: Count = 0,
    redos: Count = 0,
    resends: Count = 0,
    takeovers: Count = 0,
) -> int:
    """Check that nothing acknowledged was lost and nothing was said twice. Exit codes: 0 it holds,
    1 it does not or too little happened, 2 a file cannot be read.

    Parameters
    ----------
    files
        Histories, JSON lines each (docs/history.md).
    zombies
        At least so many writes of lost owners must have been refused, over all files.
    redos
        At least so many units must have been submitted again.
    resends
        At least so many operations must have been sent more than once.
    takeovers
        At least so many leases must have gone to another replica.
    """
    if not files:
        print("name at least one history", file=sys.stderr)
        return EXIT_UNREADABLE
    minimums = Minimums(
        refused_zombie_writes=zombies, redos=redos, resends=resends, takeovers=takeovers
    )
    try:
        reports = [_report(file) for file in files]
    except OSError as error:
        print(os_error_text(error), file=sys.stderr)
        return EXIT_UNREADABLE
    except UnreadableHistory as error:
        print(str(error), file=sys.stderr)
        return EXIT_UNREADABLE
    return _say(reports, minimums)


def _report(file: Path) -> Report:
    try:
        with file.open("rb") as lines:
            return check_history(decode_lines(lines))
    except UnreadableHistory as error:
        raise UnreadableHistory(f"{file}: {error}") from error


def _say(reports: list[Report], minimums: Minimums) -> int:
    console = Console(soft_wrap=True)
    counts = Counts()
    for report in reports:
        counts = counts.plus(report.counts)
        for violation in report.violations:
            text = f"{report.name}: {violation.rule}: {violation.session}: {violation.text}"
            console.print(escape(text))
        for reason in report.not_judged:
            console.print(escape(f"{report.name}: not judged: {reason}"))
    console.print(
        f"{counts.sessions} sessions, {counts.commands} commands, {counts.frames} messages,"
        f" {counts.committed_units} units, {counts.events} events"
    )
    console.print(
        f"refused zombie writes {counts.refused_zombie_writes}, redos {counts.redos},"
        f" resends {counts.resends}, takeovers {counts.takeovers}"
    )
    missing = minimums.missing(counts)
    for sentence in missing:
        console.print(f"too little happened: {sentence}")
    violated = sum(len(report.violations) for report in reports)
    lost = sum(report.lost for report in reports)
    twice = sum(report.duplicated for report in reports)
    sentence = f"{violated} violations: {lost} of a loss, {twice} of something said twice"
    console.print(sentence if violated or missing else "it holds")
    return EXIT_VIOLATED if violated or missing else 0
