"""The operator's process: settings, leadership, one reign after another, a clean end."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from duplex_operator.connect import connection
from duplex_operator.end_all import end_all, timeout_of
from duplex_operator.health import Health
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.leader import Leader
from duplex_operator.logs import configure_logs
from duplex_operator.memory import give_large_blocks_back
from duplex_operator.objects import ObjectKey
from duplex_operator.reign import Reign, request_gauges
from duplex_operator.settings import OperatorSettings

log = logging.getLogger(__name__)


async def operate(settings: OperatorSettings) -> None:
    """Until SIGTERM or SIGINT."""
    reigns: list[Reign] = []
    server = ApiConnection(connection(), reconnect=connection)
    lease = ObjectKey(settings.namespace, settings.lease_name)
    leader = Leader(KubernetesApi(server), lease, settings.identity)
    api = KubernetesApi(server, may_write=lambda: leader.leads)
    health = Health(
        ready=lambda: leader.in_touch and (not leader.leads or bool(reigns and reigns[-1].ready)),
        oldest_s=lambda: reigns[-1].context.dirty.oldest_s() if reigns else 0.0,
        gauges=lambda: {
            "duplex_operator_leads": float(leader.leads),
            **request_gauges(server.requests),
            **(reigns[-1].gauges() if reigns else {}),
        },
    )

    async def reign() -> None:
        reigns[:] = [Reign(settings, api)]
        await reigns[-1].run()

    runner = await health.serve(settings.health_host, settings.health_port)
    work = asyncio.create_task(leader.run(reign))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        log.info("the operator has stopped; sessions go on")
    finally:
        await runner.cleanup()
        await server.close()


def end_all_timeout_s(arguments: Sequence[str]) -> float | None:
    """Of `end-all`; None: the operator is to work. Exits with status 2 for anything else."""
    if arguments[:1] == ["end-all"]:
        return timeout_of(arguments[1:])
    argparse.ArgumentParser(
        prog="duplex_operator",
        description="Works until SIGTERM. `end-all` ends every session instead.",
    ).parse_args(arguments)
    return None


def main() -> int:
    """Returns the process's exit status."""
    give_large_blocks_back()
    timeout_s = end_all_timeout_s(sys.argv[1:])
    try:
        settings = OperatorSettings.from_environment()
    except ValueError as error:
        print(f"duplex-operator: {error}", file=sys.stderr)
        return 2
    configure_logs(settings.identity, settings.log_level)
    if timeout_s is not None:
        api = KubernetesApi(ApiConnection(connection(), reconnect=connection))
        return asyncio.run(end_all(api, settings.watch_namespaces, timeout_s))
    asyncio.run(operate(settings))
    return 0
