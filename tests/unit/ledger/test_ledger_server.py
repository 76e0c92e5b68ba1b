"""What the server says: its errors, its settings, its address."""

import traceback

import pytest
from redis import exceptions
from redis._parsers.base import BaseParser

from duplex_api.ledger_address import (
    ClusterAddress,
    SentinelAddress,
    parse_address,
    without_login,
)
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    LedgerError,
    LedgerUnavailable,
    LedgerUnsuitable,
    ServerFull,
)
from duplex_sidecar.ledger.failures import ACTIONS, Action, action_of, code_of, refusal
from duplex_sidecar.ledger.server import Durability, check_durability

pytestmark = pytest.mark.unit

AS_SENT = {
    "NOSCRIPT": "No matching script.",
    "LOADING": "Valkey is loading the dataset in memory",
    "BUSY": "Valkey is busy running a script.",
    "MASTERDOWN": "Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "TRYAGAIN": "Multiple keys request during rehashing of slot",
    "CLUSTERDOWN": "The cluster is down",
    "MISCONF": "Errors writing to the AOF file: No space left on device",
    "NOREPLICAS": "Not enough good replicas to write. script: 1, on @user_script:2.",
    "MAXCLIENTS": "max number of clients + cluster connections reached",
    "KILLED": "Error running script (call to f_1): Script killed by user with SCRIPT KILL.",
    "READONLY": "You can't write against a read only replica. script: 1, on @user_script:2.",
    "OOM": "command not allowed when used memory > 'maxmemory'. script: 1, on @user_script:2.",
    "MOVED": "3999 127.0.0.1:6381",
    "ASK": "3999 127.0.0.1:6381",
    "CROSSSLOT": "Keys in request don't hash to the same slot",
    "NOAUTH": "Authentication required.",
    "WRONGPASS": "invalid username-password pair or user is disabled.",
    "NOPERM": "User x has no permissions to run the 'evalsha' command",
    "WRONGTYPE": "Operation against a key holding the wrong kind of value",
}
OWN_CODES = {"MAXCLIENTS", "KILLED"}
"""The server calls them ERR."""
SEEN = {
    Action.LOAD_SCRIPT: LedgerUnavailable,
    Action.LATER: LedgerUnavailable,
    Action.FIND_PRIMARY: LedgerUnavailable,
    Action.RESOLVE: LedgerUnavailable,
    Action.MAKE_ROOM: ServerFull,
    Action.WRONG_ADDRESS: LedgerUnsuitable,
    Action.NO_RIGHTS: LedgerUnsuitable,
    Action.CORRUPT: LedgerCorrupt,
    Action.FAIL: LedgerError,
}


def as_parsed(line: str) -> Exception:
    """As the client library hands a server's error line over."""
    return BaseParser.parse_error(line)


@pytest.mark.parametrize("code", ACTIONS)
def test_each_error_of_the_server_has_its_action(code: str) -> None:
    error = as_parsed(f"{'ERR' if code in OWN_CODES else code} {AS_SENT[code]}")
    assert code_of(error) in (code, "NOAUTH" if code == "WRONGPASS" else code)
    assert action_of(error) is ACTIONS[code]
    seen = refusal("s", error, "duplex:{s}:meta")
    assert type(seen) is SEEN[ACTIONS[code]]
    if isinstance(seen, LedgerUnavailable):
        assert seen.pending is None, "the server said that it did not execute it"


@pytest.mark.parametrize(
    "error",
    [
        exceptions.TimeoutError("Timeout reading from socket"),
        exceptions.ConnectionError("Connection closed by server."),
        TimeoutError(),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_a_lost_answer_leaves_the_outcome_unknown(error: Exception) -> None:
    assert action_of(error) is Action.RESOLVE


def test_what_is_not_in_the_table_is_a_failure() -> None:
    assert action_of(as_parsed("ERR unknown command 'EVALSHA'")) is Action.FAIL
    assert action_of(exceptions.DataError("bad input")) is Action.FAIL


# --- durability ---------------------------------------------------------------------------------

ALWAYS = {"appendonly": "yes", "appendfsync": "always", "min-replicas-to-write": "0"}
WITH_REPLICA = {"appendonly": "yes", "appendfsync": "everysec", "min-replicas-to-write": "1"}


def test_a_server_that_can_is_taken() -> None:
    check_durability(Durability.MEMORY, {}, None)
    check_durability(Durability.FSYNC, {}, ALWAYS)
    check_durability(Durability.REPLICATED, {"connected_slaves": 1}, WITH_REPLICA)


@pytest.mark.parametrize(
    ("durability", "replicas", "config", "words"),
    [
        (Durability.FSYNC, 0, {**ALWAYS, "appendfsync": "everysec"}, "appendfsync everysec"),
        (Durability.FSYNC, 0, {**ALWAYS, "appendonly": "no"}, "appendonly no"),
        (Durability.FSYNC, 0, {}, "appendonly unset"),
        (Durability.FSYNC, 0, None, "CONFIG GET"),
        (Durability.REPLICATED, 1, None, "CONFIG GET"),
        (Durability.REPLICATED, 1, ALWAYS, "min-replicas-to-write"),
        (Durability.REPLICATED, 0, WITH_REPLICA, "has 0"),
    ],
)
def test_a_promise_that_the_server_cannot_keep_is_refused(
    durability: Durability, replicas: int, config: dict[str, str] | None, words: str
) -> None:
    with pytest.raises(LedgerUnsuitable, match=words):
        check_durability(durability, {"connected_slaves": replicas}, config)


# --- address ------------------------------------------------------------------------------------


def test_one_server_is_named_by_its_url() -> None:
    for url in ("redis://h:1/0", "rediss://u:p@h", "unix:///run/valkey.sock"):
        assert parse_address(url) == url


def test_sentinels_are_named_with_their_service() -> None:
    url = "rediss+sentinel://duplex:p%40ss@a:26380,[::1]:26381,b/main/2?sentinel_password=s"
    assert parse_address(url) == SentinelAddress(
        sentinels=(("a", 26_380), ("::1", 26_381), ("b", 26_379)),
        service="main",
        database=2,
        username="duplex",
        password="p@ss",
        sentinel_username="",
        sentinel_password="s",
        tls=True,
    )


@pytest.mark.parametrize(
    "rest",
    ["secret@a:1", "secret@/main", "secret@a:x/main", "secret@a/main/x", "secret@a/main/0/1",
     "secret@a/main?db=1", "secret@a,/main", "secret@a:70000/main"],
)  # fmt: skip
def test_a_wrong_address_is_refused_without_its_password(rest: str) -> None:
    with pytest.raises(ValueError, match=r"Sentinel|ledger address") as error:
        parse_address(f"redis+sentinel://{rest}")
    assert "secret" not in str(error.value)


def test_an_address_of_a_cluster_names_some_of_its_nodes() -> None:
    address = parse_address("rediss+cluster://duplex:p%40ss@a,b:7001,[::1]:7002")
    nodes = (("a", 6379), ("b", 7001), ("::1", 7002))
    assert address == ClusterAddress(nodes, "duplex", "p@ss", tls=True)


@pytest.mark.parametrize("rest", ["", "u:secret@", "secret/0", "h?secret=1", "secret:x", "h,:1"])
def test_a_wrong_address_of_a_cluster_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="address") as error:
        parse_address(f"redis+cluster://{rest}")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["redis://:12#34secret@h:6379/0", "redis://u:12/secret@h", "redis://u:12?secret@h",
     "redis://secret/x@h", "redis://u:secret]@h", "redis://u:secret:x", "rubbish://secret",
     "redis+sentinel://u:p?secret=1@a:1/main", "redis+sentinel://u:secret[@a/main"],
)  # fmt: skip
async def test_no_part_of_a_password_gets_into_an_error(url: str) -> None:
    with pytest.raises(LedgerUnsuitable) as error:
        await Connection.connect(url, call_timeout_ms=50, load_timeout_ms=50, connections=1)
    told = "".join(traceback.format_exception(error.value))
    assert "secret" not in told
    assert "12" not in told.splitlines()[-1]


def test_an_address_is_shown_without_its_login() -> None:
    assert without_login("redis://u:secret@h:1/2?password=secret") == "redis://h:1/2"
    assert without_login("redis+sentinel://u:p@a:1,b/main") == "redis+sentinel://a:1,b/main"
    assert without_login("unix:///run/valkey.sock") == "unix:///run/valkey.sock"
    assert without_login("redis://u:sec#ret@h") == "not a ledger address"
