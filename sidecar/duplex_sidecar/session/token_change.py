"""A session gets another token: both let a client in until the first message under the new one.

So a reply that was lost on its way to whoever changes tokens strands nobody. The ledger has both
for every replica. That one is confirmed it is told in the background, since no client waits for it:
until it knows, another replica still lets in the old one.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable, ServerFull
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.ledger.token import TokenMatch, match_sha256

log = logging.getLogger(__name__)


@dataclass
class ClientTokens:
    """Hashes of the tokens that let a client in. offered_sha256: of the one that replaces the other
    with its first message; "" for none. confirmed: the ledger has the current one as such, or will
    not have it; else it is told with a message under it, whichever connection that comes over."""

    current_sha256: str
    offered_sha256: str = ""
    confirmed: bool = True

    def match(self, token_sha256: str) -> TokenMatch:
        return match_sha256(token_sha256, self.current_sha256, self.offered_sha256)

    def hears(self, token_sha256: str) -> bool:
        """Whether the first message of a client that came with it says something new."""
        match self.match(token_sha256):
            case TokenMatch.OFFERED:
                return True
            case TokenMatch.CURRENT:
                return not self.confirmed
            case TokenMatch.NONE:
                return False

    def lets_in(self, token_sha256: str) -> bool:
        return self.match(token_sha256) is not TokenMatch.NONE


async def offer_token(
    ledger: Ledger, lease: Lease, tokens: ClientTokens, token_sha256: str
) -> None:
    """The operator's word: this one is to let in. Naming the one that does takes back what was
    offered. Raises what the ledger refuses.

    What is taken back counts no more from here on: a message under it that came while the ledger
    is told would else lock out the one that is to let in."""
    match tokens.match(token_sha256):
        case TokenMatch.OFFERED:
            return
        case TokenMatch.CURRENT:
            offered = ""
        case TokenMatch.NONE:
            offered = token_sha256
    withdrawn = tokens.offered_sha256
    if offered == withdrawn:
        return
    tokens.offered_sha256 = ""
    try:
        await ledger.offer_token(lease, offered)
    except BaseException:
        tokens.offered_sha256 = withdrawn  # so that the next word is told, too
        raise
    tokens.offered_sha256 = offered


class NewToken:
    """What the messages of a client say of the token that it came with."""

    def __init__(
        self,
        ledger: Ledger,
        lease: Callable[[], Lease],
        tokens: ClientTokens,
        token_sha256: str,
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._tokens = tokens
        self._token_sha256 = token_sha256
        self._telling: asyncio.Task[None] | None = None
        self._complained = False

    def said(self) -> None:
        """A message came. Where the ledger could not be told at the last one, it is told now."""
        if self._telling is not None or not self._tokens.hears(self._token_sha256):
            return
        if self._tokens.match(self._token_sha256) is TokenMatch.OFFERED:
            self._tokens.current_sha256 = self._token_sha256
            self._tokens.offered_sha256 = ""
            self._tokens.confirmed = False
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        try:
            await self._ledger.confirm_token(self._lease(), self._token_sha256)
        except (LedgerUnavailable, ServerFull) as error:
            if not self._complained:  # it is tried with each message
                log.info("a new token is not confirmed yet: %s", error.reason)
            self._complained = True
        except LedgerError as error:
            log.warning("a new token is not confirmed: %s", type(error).__name__)
            self._answered()
        else:
            self._answered()
        finally:
            self._telling = None

    def _answered(self) -> None:
        """A refusal is final, too: another token was offered before this was asked, or the lease is
        lost."""
        if self._tokens.match(self._token_sha256) is TokenMatch.CURRENT:
            self._tokens.confirmed = True
