"""What a verb is told on the command line. Each kind of value is one type here, and looks at it
before the verb starts anything; a wrong one ends with status 2 and one sentence."""

import errno
import math
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import CycloptsError, MissingArgumentError, Parameter, ValidationError, validators
from rich.text import Text

from duplex_api.ledger_address import parse_address


def os_error_text(error: OSError) -> str:
    """FILE: what is wrong with it."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _file(_: Any, given: Any) -> None:
    for path in given if isinstance(given, tuple) else (given,):
        if path is not None:
            _require_readable(path, folder=False)


def _folder(_: Any, path: Path | None) -> None:
    if path is not None:
        _require_readable(path, folder=True)


def _require_readable(path: Path, *, folder: bool) -> None:
    """Pipes and devices count as files."""
    reason = None
    try:
        path.stat()
    except OSError as error:
        reason = error.strerror
    else:
        if path.is_dir() is not folder:
            reason = os.strerror(errno.ENOTDIR if folder else errno.EISDIR)
        elif not os.access(path, os.R_OK):
            reason = os.strerror(errno.EACCES)
    if reason is not None:
        raise ValueError(f"{path}: {reason}")


def _address(_: Any, url: str | None) -> None:
    if url is not None:
        parse_address(url)


def _finite(_: Any, number: float | None) -> None:
    if number is not None and not math.isfinite(number):
        raise ValueError("Must be a number that is finite.")


InputFile = Annotated[Path, Parameter(validator=_file)]
"""One file that is there and can be read; in a list, each of them."""

InputFolder = Annotated[Path, Parameter(validator=_folder)]

OutputPath = Annotated[Path, Parameter()]
"""To be made; `cli.output` looks at its room."""

CheckpointPath = Annotated[Path, Parameter()]
"""A missing one is told with how to make one (`CheckpointError`)."""

LedgerUrl = Annotated[str, Parameter(validator=_address)]

Port = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65_535))]

Count = Annotated[int, Parameter(validator=validators.Number(gte=0))]

AtLeastOne = Annotated[int, Parameter(validator=validators.Number(gte=1))]

Duration = Annotated[float, Parameter(validator=(_finite, validators.Number(gte=0)))]
"""Its unit stands in the option's name."""

Factor = Annotated[float, Parameter(validator=(_finite, validators.Number(gt=0)))]


def complaint(error: CycloptsError) -> Text:
    """What is printed of a command line that cannot be used."""
    verb = " ".join(("duplex", *(error.command_chain or ())))
    argument = error.argument
    if isinstance(error, MissingArgumentError) and argument is not None and not argument.tokens:
        short = [name for name in argument.names if len(name) == 2]
        name = argument.name + (f" ({short[0]})" if short else "")
        said = f"{name} is missing: {_described(error, argument.name)}"
    elif isinstance(error, ValidationError) and argument is not None:
        said = f"{argument.name}: {error.exception_message}"
    else:
        said = str(error)
    return Text(f"{verb}: {said}\nmore: {verb} --help")


def _described(error: CycloptsError, name: str) -> str:
    """What the verb's help says of an argument."""
    if error.app is None:
        return "a value"
    known = error.app.assemble_argument_collection(parse_docstring=True)
    return next((one.parameter.help for one in known if one.name == name), None) or "a value"
