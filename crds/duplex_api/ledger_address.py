"""Where the ledger is: one server by URL, the primary that Sentinels name, or a cluster.

    redis://user:password@host:6379/0     one server (rediss:// with TLS, unix:///path)
    redis+sentinel://user:password@sentinel-a:26379,sentinel-b:26379/service/0
    rediss+sentinel://...                 TLS to the servers and the Sentinels
    redis+cluster://user:password@node-a:6379,node-b:6379
    rediss+cluster://...                  any nodes of it; the others are asked for

User and password are the server's; `?sentinel_username=...&sentinel_password=...` the Sentinels'.
"""

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

BAD_ADDRESS = (
    "not a ledger address (redis://, rediss://, unix://, redis+sentinel://, redis+cluster://); in"
    " user and password every one of / # ? @ : % has to be percent-encoded"
)
_ONE_SERVER = ("redis", "rediss", "unix")
_SENTINEL = {"redis+sentinel": False, "rediss+sentinel": True}
_CLUSTER = {"redis+cluster": False, "rediss+cluster": True}
_DEFAULT_PORT = 26_379
_DEFAULT_NODE_PORT = 6_379


@dataclass(frozen=True)
class SentinelAddress:
    """tls: also to the Sentinels. Names and passwords are "" where none is given."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    database: int
    username: str
    password: str
    sentinel_username: str
    sentinel_password: str
    tls: bool


@dataclass(frozen=True)
class ClusterAddress:
    """nodes: some of them, to ask for the others. username, password: "" where none is given."""

    nodes: tuple[tuple[str, int], ...]
    username: str
    password: str
    tls: bool


def parse_address(url: str) -> str | SentinelAddress | ClusterAddress:
    """The URL itself where it names one server. Raises ValueError, never with anything of the URL
    in it: it may be of a password."""
    scheme, separator, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        if not separator or scheme not in (*_ONE_SERVER, *_SENTINEL, *_CLUSTER):
            raise ValueError(BAD_ADDRESS)
        if scheme in _ONE_SERVER:
            _ = parts.port  # raises ValueError where it is no port
    except ValueError:
        raise ValueError(BAD_ADDRESS) from None
    # A password with one of these as they are would be read as host, port, path or query, and come
    # back in the text of whatever goes wrong with them.
    if parts.fragment or (scheme != "unix" and "@" in parts.path + parts.query):
        raise ValueError("user and password have to be percent-encoded in a ledger address")
    if scheme not in _SENTINEL and scheme not in _CLUSTER:
        return url
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    if scheme in _CLUSTER:
        if not hosts or parts.path.strip("/") or parts.query:
            raise ValueError("a cluster address is redis+cluster://host:port[,host:port]")
        return ClusterAddress(
            nodes=tuple(_host_and_port(host, _DEFAULT_NODE_PORT) for host in hosts.split(",")),
            username=unquote(username),
            password=unquote(password),
            tls=_CLUSTER[scheme],
        )
    path = [part for part in parts.path.split("/") if part]
    if not path or len(path) > 2 or not hosts:
        raise ValueError("a Sentinel address is redis+sentinel://host:port[,host:port]/service[/0]")
    if len(path) == 2 and not path[1].isdecimal():
        raise ValueError("the last part of a Sentinel address is a database number")
    query = dict(parse_qsl(parts.query))
    if set(query) - {"sentinel_username", "sentinel_password"}:
        raise ValueError("a Sentinel address takes sentinel_username and sentinel_password alone")
    return SentinelAddress(
        sentinels=tuple(_host_and_port(host, _DEFAULT_PORT) for host in hosts.split(",")),
        service=unquote(path[0]),
        database=int(path[1]) if len(path) == 2 else 0,
        username=unquote(username),
        password=unquote(password),
        sentinel_username=query.get("sentinel_username", ""),
        sentinel_password=query.get("sentinel_password", ""),
        tls=_SENTINEL[scheme],
    )


def without_login(url: str) -> str:
    """To be shown: neither user nor password, whoever they are of."""
    try:
        parse_address(url)
    except ValueError:
        return "not a ledger address"
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, ":", "")
    if not colon:
        host, port = text, ""
    if port and not (port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError("a port in a ledger address is a number from 1 to 65535")
    if not host:
        raise ValueError("a ledger address without a host")
    return host.strip("[]"), int(port) if port else default_port
