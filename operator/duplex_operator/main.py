"""The operator's process: settings, leadership, one reign after another, a clean end."""

import asyncio
import logging
import signal
import sys

from duplex_operator.apply import KubernetesApi
from duplex_operator.connect import connection
from duplex_operator.end_all import end_all, timeout_of
from duplex_operator.health import Health
from duplex_operator.leader import Leader
from duplex_operator.objects import ObjectKey
from duplex_operator.reign import Reign
from duplex_operator.settings import OperatorSettings

log = logging.getLogger(__name__)


async def operate(settings: OperatorSettings) -> None:
    """Until SIGTERM or SIGINT."""
    reigns: list[Reign] = []
    api = KubernetesApi(connection(), may_write=lambda: leader.leads, reconnect=connection)
    leader = Leader(api, ObjectKey(settings.namespace, settings.lease_name), settings.identity)
    health = Health(
        ready=lambda: not leader.leads or bool(reigns and reigns[-1].synchronised),
        oldest_s=lambda: reigns[-1].context.dirty.oldest_s() if reigns else 0.0,
        gauges=lambda: {
            "duplex_operator_leads": float(leader.leads),
            **(reigns[-1].gauges() if reigns else {}),
        },
    )

    async def reign() -> None:
        reigns[:] = [Reign(settings, api, connection)]
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
        await api.close()


def main() -> int:
    """Returns the process's exit status."""
    timeout_s = timeout_of(sys.argv[2:]) if sys.argv[1:2] == ["end-all"] else None
    try:
        settings = OperatorSettings.from_environment()
    except ValueError as error:
        print(f"duplex-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for name in ("kopf", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if timeout_s is not None:
        api = KubernetesApi(connection(), reconnect=connection)
        return asyncio.run(end_all(api, settings.watch_namespaces, timeout_s))
    asyncio.run(operate(settings))
    return 0
