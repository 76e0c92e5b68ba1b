"""What the ledger's verbs share: where it is, and what their exit codes mean."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

from cyclopts import Parameter

from duplex_sidecar.cli.inputs import LedgerUrl, os_error_text
from duplex_sidecar.cli.output import OutputFailed
from duplex_sidecar.ledger.errors import LedgerCorrupt, LedgerError

Url = Annotated[
    LedgerUrl,
    Parameter(
        name="--url",
        env_var="DUPLEX_LEDGER_URL",
        help="Redis or Valkey: redis://, unix://, redis+sentinel://host/service, "
        "redis+cluster://host; or in the variable DUPLEX_LEDGER_URL",
    ),
]


def guarded(work: Callable[[], Awaitable[int]]) -> int:
    """Exit codes: 0 fine, 1 the ledger is corrupt, 2 it cannot be read or there is no such one."""

    async def run() -> int:
        return await work()

    try:
        return asyncio.run(run())
    except LedgerCorrupt as error:
        print(f"corrupt: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(os_error_text(error), file=sys.stderr)
        return 2
    except (LedgerError, OutputFailed, ValueError) as error:
        print(str(error), file=sys.stderr)
        return 2
