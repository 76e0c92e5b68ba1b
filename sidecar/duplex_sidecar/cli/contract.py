"""`duplex contract`: is the product exact to recorded behaviour of the public implementation?"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="contract", help="Check the product against recorded behaviour of the model.")

EXIT_DIFFERENT = 1
EXIT_UNUSABLE = 2


@app.command
def check(
    *files: Path,
    show: Annotated[int, Parameter(name="--show")] = 5,
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> int:
    """Run recorded files through the functions that the sidecar runs.

    The exit status is 0 when everything is equal, 1 on any difference, 2 when a file cannot be
    checked at all.

    Parameters
    ----------
    files
        Recorded files; the part of the name before the first dot tells the kind.
    show
        Differences to print per file.
    list_
        Show what the kinds of files cover, and what they do not.
    """
    if list_:
        _print_kinds()
    elif not files:
        print("name at least one file, or ask for --list", file=sys.stderr)
        return EXIT_UNUSABLE
    # The worst outcome decides the exit status.
    return max([_check(path, show) for path in files], default=0)


def _check(path: Path, show: int) -> int:
    # Imported late: the decode cases bring torch, which --help has no use for.
    from duplex_sidecar.contract.check import check_file
    from duplex_sidecar.contract.files import ContractFileError

    try:
        report = check_file(path)
    except ContractFileError as error:
        print(f"{error}", file=sys.stderr)
        return EXIT_UNUSABLE
    verdict = f"{len(report.differences)} DIFFERENT" if report.differences else "equal"
    skipped = f", {report.skipped_steps} steps skipped" if report.skipped_steps else ""
    counts = f"{report.cases} cases, {report.comparisons} comparisons{skipped}"
    print(f"{path.name}: {report.kind}: {counts}: {verdict}", flush=True)
    for difference in report.differences[: max(0, show)]:
        print(f"  case {difference.case}, {difference.where}")
        print(f"    recorded: {difference.expected}")
        print(f"    product:  {difference.actual}")
    return EXIT_DIFFERENT if report.differences else 0


def _print_kinds() -> None:
    from duplex_sidecar.contract.check import KINDS, NOT_COVERED

    width = max(map(len, KINDS))
    print("Covered (kind of file: what it checks)")
    for name, kind in KINDS.items():
        print(f"  {name:<{width}}  {kind.covers}")
    print("Not covered by any recorded file")
    for subject in NOT_COVERED:
        print(f"  {subject}")
