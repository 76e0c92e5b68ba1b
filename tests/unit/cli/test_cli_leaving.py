"""A verb that is asked to leave stops what it has started, however often it is asked."""

import signal

import pytest

from duplex_sidecar.cli.leaving import leaves_in_order

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_a_second_signal_breaks_off_nothing(sent: signal.Signals) -> None:
    before = signal.getsignal(sent)
    stopped: list[str] = []

    def work() -> None:
        try:
            signal.raise_signal(sent)
            stopped.append("went on")
        finally:
            signal.raise_signal(sent)
            stopped.append("the sidecar")
            signal.raise_signal(signal.SIGTERM)
            stopped.append("its ledger")

    with pytest.raises(KeyboardInterrupt), leaves_in_order():
        work()
    assert stopped == ["the sidecar", "its ledger"]
    assert signal.getsignal(sent) is before
