"""Nothing here is about how long a lease lasts, or how soon the product gives up."""

from collections.abc import Iterator

import pytest
from support.patience import unhurried


@pytest.fixture(autouse=True)
def _unhurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        unhurried(patch)
        yield
