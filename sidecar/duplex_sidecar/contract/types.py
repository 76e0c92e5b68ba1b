"""What a contract check reports. Shared by the runners of all kinds of recorded files."""

from collections.abc import Callable, Mapping

import msgspec

MAX_VALUE_CHARACTERS = 200
"""Longer values are cut in a difference: a report names the place, not the whole value."""


class Difference(msgspec.Struct, frozen=True):
    """One value that the product computes differently from the recorded one.

    case: id of the case in its file. where: place inside the case, for example "append 3.action".
    expected, actual: the two values as text.
    """

    case: str
    where: str
    expected: str
    actual: str


class CaseResult(msgspec.Struct, frozen=True):
    """Outcome of one recorded case.

    comparisons: number of values that were compared. skipped_steps: steps not compared because the
    record marks them (`upstream_quirk`) or because they follow such a step. unusable: the case is
    not in the schema of its kind, which is its one difference. failed: it could not be run
    through, for this or another reason.
    """

    comparisons: int
    differences: tuple[Difference, ...]
    skipped_steps: int = 0
    unusable: bool = False
    failed: bool = False


class ContractFileError(ValueError):
    """A file cannot be checked: unreadable, of unknown kind, or not in the schema of its kind."""


def guarded(place: str, run: Callable[[], CaseResult]) -> CaseResult:
    """The result of one case. Whatever it raises is one difference like any other: the cases behind
    it are checked as if it had not been there."""
    try:
        return run()
    except ContractFileError as error:
        return _failed(place, str(error), unusable=True)
    except Exception as error:
        return raised(place, error)


def raised(place: str, error: Exception) -> CaseResult:
    """What a case comes to that the product's code cannot get through."""
    return _failed(place, f"{type(error).__name__}: {error}", unusable=False)


def _failed(place: str, problem: str, *, unusable: bool) -> CaseResult:
    difference = Difference(place, "the whole case", "a result", _cut(problem))
    return CaseResult(1, (difference,), unusable=unusable, failed=True)


def has_quirk(expected: Mapping[str, object]) -> bool:
    """Whether the record says that this is not to be copied: the step and the rest of its case are
    not compared."""
    return expected.get("upstream_quirk") is not None


class Comparison:
    """Collects the comparisons of one case; a runner makes one, calls `same`, returns `result`."""

    def __init__(self, case: object) -> None:
        self._case = str(case)
        self._comparisons = 0
        self._skipped_steps = 0
        self._differences: list[Difference] = []

    def same(self, where: str, expected: object, actual: object) -> bool:
        """Compare one value; returns whether it is equal."""
        self._comparisons += 1
        if expected == actual:
            return True
        self._differences.append(
            Difference(self._case, where, _shorten(expected), _shorten(actual)),
        )
        return False

    def skip(self, steps: int) -> None:
        """Count steps that are not compared."""
        self._skipped_steps += steps

    def result(self) -> CaseResult:
        return CaseResult(self._comparisons, tuple(self._differences), self._skipped_steps)


def _shorten(value: object) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return text[: MAX_VALUE_CHARACTERS - 3] + "..."
