"""A certificate that is read again when its files change; connections that stand keep theirs."""

import asyncio
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0


class Certificate:
    """A certificate and its key in two files, PEM."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._files = (Path(cert_file), Path(key_file))
        self._read = self._contents()

    async def follow(self, context: ssl.SSLContext) -> None:
        """Until it is cancelled: load what has changed into the context of the server."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(context)

    def look(self, context: ssl.SSLContext) -> bool:
        """Whether another pair was loaded. One that does not fit together, or cannot be read, is
        left alone: it may be half written."""
        try:
            contents = self._contents()
            if contents == self._read:
                return False
            cert_file, key_file = map(str, self._files)
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
            context.load_cert_chain(cert_file, key_file)
        except (OSError, ssl.SSLError) as error:
            log.error("certificate cannot be read: %s", type(error).__name__)
            return False
        self._read = contents
        log.info("certificate read again")
        return True

    def _contents(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files)
