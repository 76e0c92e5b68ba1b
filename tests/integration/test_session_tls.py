"""A conversation whose ledger is reached by TLS: opened, talked in, resumed elsewhere, through a
broken connection; and servers whose certificate is not trusted."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.certificates import make_certificate
from support.tls_proxy import TlsProxy

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LedgerUnsuitable
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.store import Ledger

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import Caller, Terms, check_events, replica, tokens, undisturbed

pytestmark = pytest.mark.integration
UNITS = 12


def certificate(folder: Path, address: str) -> tuple[Path, Path]:
    folder.mkdir()
    return make_certificate(folder, "ledger", address)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    return certificate(tmp_path / "own", "127.0.0.1")


@pytest.fixture
async def proxy(valkey: EmbeddedValkey, own: tuple[Path, Path]) -> AsyncIterator[TlsProxy]:
    async with TlsProxy(valkey.url, *own) as proxy:
        yield proxy


async def test_a_conversation_over_tls(
    valkey: EmbeddedValkey, proxy: TlsProxy, own: tuple[Path, Path]
) -> None:
    url, terms = proxy.url(own[0]), Terms("context")
    calm, _ = await undisturbed(valkey.url, "calm-tls", terms, UNITS)
    async with replica(url, "here") as here, replica(url, "there") as there:
        await here.open("tls", terms)
        caller = Caller("tls")
        await caller.dial(here)
        await caller.talk(4)
        proxy.cut()
        await caller.talk(8)
        await here.registry.departures.park("tls")
        await caller.dial(there)
        await caller.talk(UNITS)
        assert await tokens(there.ledger, "tls") == calm
        check_events(caller)
    assert proxy.connections > 2


async def test_a_server_that_is_not_trusted_is_refused_at_start(
    valkey: EmbeddedValkey, proxy: TlsProxy, tmp_path: Path
) -> None:
    """Another authority; the right one, but the certificate of another server."""
    stranger, _ = certificate(tmp_path / "stranger", "127.0.0.1")
    with pytest.raises(LedgerUnsuitable, match="certificate is not trusted"):
        await Ledger.connect(proxy.url(stranger))
    with pytest.raises(LedgerUnsuitable, match="certificate is not trusted"):
        await LedgerReader.connect(proxy.url(stranger))
    elsewhere = certificate(tmp_path / "elsewhere", "127.0.0.2")
    async with TlsProxy(valkey.url, *elsewhere) as other:
        with pytest.raises(LedgerUnsuitable, match="certificate is not trusted"):
            await Ledger.connect(other.url(elsewhere[0]))
    assert proxy.connections == 0
