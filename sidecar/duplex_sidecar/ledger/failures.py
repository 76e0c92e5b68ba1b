"""What each of the server's errors means for the ledger: one table. Pure.

| error | executed? | what is done |
|---|---|---|
| time-out, lost connection | unknown | sent again under its operation id, then told as pending |
| NOSCRIPT | no | the script is loaded and sent again at once |
| LOADING, BUSY, MASTERDOWN, TRYAGAIN, CLUSTERDOWN, MISCONF, NOREPLICAS | no | later |
| no room for connections, a script that somebody killed | no | later |
| an error behind the script (a demoted primary ends `WAIT`) | yes | as no answer: unconfirmed |
| READONLY | no | the connections are dropped, so that the primary is looked for again; later |
| OOM | no | `ServerFull`: an owner waits and keeps its lease, a new session is refused |
| MOVED, ASK | no | sent where they point; refused where the address is of one node alone |
| CROSSSLOT | no | refused: this address does not lead to all of the ledger |
| NOAUTH, WRONGPASS, NOPERM | no | refused: the user lacks rights |
| WRONGTYPE | no | this session's ledger is corrupt |
| anything else | no | an error of this ledger |
"""

import ssl
from enum import StrEnum

from redis import exceptions

from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    LedgerError,
    LedgerUnavailable,
    LedgerUnsuitable,
    ServerFull,
)


class Action(StrEnum):
    RESOLVE = "resolve"
    LOAD_SCRIPT = "load_script"
    LATER = "later"
    FIND_PRIMARY = "find_primary"
    MAKE_ROOM = "make_room"
    WRONG_ADDRESS = "wrong_address"
    NO_RIGHTS = "no_rights"
    CORRUPT = "corrupt"
    FAIL = "fail"


ACTIONS = {
    "NOSCRIPT": Action.LOAD_SCRIPT,
    "LOADING": Action.LATER,
    "BUSY": Action.LATER,
    "MASTERDOWN": Action.LATER,
    "TRYAGAIN": Action.LATER,
    "CLUSTERDOWN": Action.LATER,
    "MISCONF": Action.LATER,
    "NOREPLICAS": Action.LATER,
    "MAXCLIENTS": Action.LATER,
    "KILLED": Action.LATER,
    "READONLY": Action.FIND_PRIMARY,
    "OOM": Action.MAKE_ROOM,
    "MOVED": Action.WRONG_ADDRESS,
    "ASK": Action.WRONG_ADDRESS,
    "CROSSSLOT": Action.WRONG_ADDRESS,
    "NOAUTH": Action.NO_RIGHTS,
    "WRONGPASS": Action.NO_RIGHTS,
    "NOPERM": Action.NO_RIGHTS,
    "WRONGTYPE": Action.CORRUPT,
}

_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.NoScriptError, "NOSCRIPT"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
    (exceptions.ClusterCrossSlotError, "CROSSSLOT"),
    (exceptions.AuthenticationError, "NOAUTH"),
    (exceptions.NoPermissionError, "NOPERM"),
)
"""The client library cuts the code off the text of these. Subclasses before their bases."""

NO_OUTCOME = (exceptions.ConnectionError, exceptions.TimeoutError, TimeoutError, OSError)
"""After these a command may or may not have been executed, if the server did not say why."""


_WORDS = {
    "max number of clients": "MAXCLIENTS",
    "Script killed by user": "KILLED",
}
"""Errors of the plain code ERR that pass, by what is in their text. A script that has written is
never killed."""


def code_of(error: BaseException) -> str:
    """The server's word for it, "" for an error that is not the server's."""
    for kind, code in _CLASSES:
        if isinstance(error, kind):
            return code
    if not isinstance(error, exceptions.ResponseError):
        return ""
    text = str(error)
    known = next((code for words, code in _WORDS.items() if words in text), None)
    return known or text.split(" ", 1)[0]


def action_of(error: BaseException) -> Action:
    action = ACTIONS.get(code_of(error))
    if action is not None:
        return action
    return Action.RESOLVE if isinstance(error, NO_OUTCOME) else Action.FAIL


def refusal(session: str, error: Exception, key: str = "") -> LedgerError:
    """The error that callers see, for what is not sent again. The text never holds arguments, only
    the server's words. key: what the command was about."""
    words = words_of(error)
    match action_of(error):
        case Action.LATER | Action.FIND_PRIMARY | Action.LOAD_SCRIPT:
            return LedgerUnavailable(session, f"server refuses for now: {words}")
        case Action.RESOLVE:
            return LedgerUnavailable(session, f"no answer: {words}")
        case Action.MAKE_ROOM:
            return ServerFull(session, "server has reached its memory limit")
        case Action.WRONG_ADDRESS:
            text = "the address is of one node of a cluster of several: name it redis+cluster://"
            return LedgerUnsuitable(session, f"{text}: {words}")
        case Action.NO_RIGHTS:
            return LedgerUnsuitable(session, f"server refuses this user: {words}")
        case Action.CORRUPT:
            return LedgerCorrupt(session, f"key {key}".rstrip(), "has a foreign type")
        case Action.FAIL:
            return LedgerError(session, f"server error: {words}")


def untrusted(error: BaseException) -> str:
    """Why the server's certificate is not trusted, "" where the error has another reason."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"the server's certificate is not trusted: {seen.verify_message}"
        seen = seen.__cause__ or seen.__context__
    return ""


def words_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
