"""`duplex contract`: is the product, and what it did, exact to recorded public behaviour?"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from duplex_sidecar.cli.inputs import Count, InputFile, OutputPath, os_error_text

app = App(name="contract", help="Check the product, and what it did, against recorded behaviour.")

EXIT_DIFFERENT = 1
EXIT_UNUSABLE = 2


@app.command
def check(
    *files: InputFile,
    show: Annotated[Count, Parameter(name="--show")] = 5,
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> int:
    """Run recorded files through the functions that the sidecar runs.

    A case that cannot be run is a difference, and the others are checked. The exit status is 0 when
    everything is equal, 1 on any difference, 2 when a file cannot be checked at all (it cannot be
    read to its end, or holds no case of its kind).

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


@app.command
def record(
    *tapes: InputFile,
    output: Annotated[OutputPath, Parameter(name=["--output", "-o"])],
) -> int:
    """Turn tapes of live sessions into files for `duplex contract check`.

    A sidecar writes tapes when its setting contract_tape_dir names a folder (`duplex serve` and
    `duplex run`: --contract-tape). What was planned is not on them: it is measured from what the
    stages were really fed and answered. Tapes of one session go together, also from two replicas.
    The files hold token ids and prompts: treat them as content. The exit status is 1 when a
    session did something wrong that no recorded schema can show, 2 when the tapes cannot be used.

    Parameters
    ----------
    tapes
        Files named SESSION.FENCE.tape.jsonl, with decode_vocab.json beside them.
    output
        Folder for the files.
    """
    from duplex_sidecar.contract.recorder import record as write_traces
    from duplex_sidecar.contract.recorder_tape import TapeError
    from duplex_sidecar.contract.types import ContractFileError

    if not tapes:
        print("name at least one tape", file=sys.stderr)
        return EXIT_UNUSABLE
    try:
        report = write_traces(tapes, output)
    except (TapeError, ContractFileError) as error:
        print(f"{error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except OSError as error:
        print(os_error_text(error), file=sys.stderr)
        return EXIT_UNUSABLE
    for path, cases in report.files:
        print(f"{path}: {cases} {'case' if cases == 1 else 'cases'}")
    for reason in report.left_out:
        print(f"left out: {reason}", file=sys.stderr)
    for finding in report.findings:
        print(f"WRONG: {finding}", file=sys.stderr)
    if not report.files:
        return EXIT_UNUSABLE
    return EXIT_DIFFERENT if report.findings else 0


def _check(path: Path, show: int) -> int:
    # Imported late: the decode cases bring torch, which --help has no use for.
    from duplex_sidecar.contract.check import check_file
    from duplex_sidecar.contract.types import ContractFileError

    try:
        report = check_file(path)
    except ContractFileError as error:
        print(f"{error}", file=sys.stderr)
        return EXIT_UNUSABLE
    verdict = f"{len(report.differences)} DIFFERENT" if report.differences else "equal"
    skipped = f", {report.skipped_steps} steps skipped" if report.skipped_steps else ""
    counts = f"{report.cases} cases, {report.comparisons} comparisons{skipped}"
    print(f"{path.name}: {report.kind}: {counts}: {verdict}", flush=True)
    for difference in report.differences[:show]:
        print(f"  case {difference.case}, {difference.where}")
        print(f"    recorded: {difference.expected}")
        print(f"    product:  {difference.actual}")
    return EXIT_DIFFERENT if report.differences else 0


def _print_kinds() -> None:
    from duplex_sidecar.contract.check import KINDS, NOT_COVERED
    from duplex_sidecar.contract.recorder import NOT_RECORDED, RECORDED

    width = max(map(len, KINDS))
    print("Covered (kind of file: what it checks)")
    for name, kind in KINDS.items():
        print(f"  {name:<{width}}  {kind.covers}")
    print("Not covered by any recorded file")
    for subject in NOT_COVERED:
        print(f"  {subject}")
    print("Written by `duplex contract record` (kind of file: what of a live session is in it)")
    for name, content in RECORDED.items():
        print(f"  {name:<{width}}  {content}")
    print("Not recorded")
    for subject in NOT_RECORDED:
        print(f"  {subject}")
