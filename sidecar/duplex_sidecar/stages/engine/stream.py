"""One stream: a resumable request of the engine, fed unit by unit, and ended without a trace.

Stands on `AsyncLLM.generate` over an async generator of `StreamingInput`. The engine drops the last
token of each answer (it has no KV and no hidden row); whoever feeds the stream begins the next
prompt with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

_END_TIMEOUT_S = 10.0
_ABORT_INTERVAL_S = 0.02


def unit_params(max_tokens: int, stop_ids: list[int], extra_args: dict[str, Any]) -> SamplingParams:
    """Greedy parameters of one unit: our logits processor has already chosen."""
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args,
    )


class StreamLostError(Exception):
    """The engine ended the stream, or never came back; it cannot be fed any more."""


class EngineStream:
    """Not safe for two units at a time: the caller waits for one answer before the next feed."""

    def __init__(self, engine: AsyncLLM, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue(maxsize=2)
        self._answer: asyncio.Future[list[int]] | None = None
        self._reader = asyncio.create_task(self._read())

    async def _feed(self) -> AsyncGenerator[StreamingInput, None]:
        while (item := await self._inputs.get()) is not None:
            yield item

    async def _read(self) -> None:
        """Collect tokens into answers until the engine ends the request."""
        reason = "the engine ended the stream"
        tokens: list[int] = []
        # The parameters given here only validate the stream and sign its end.
        opening = unit_params(1, [], {})
        try:
            async for output in self._engine.generate(self._feed(), opening, self._request_id):
                part = output.outputs[0]
                tokens.extend(part.token_ids)
                # A finish reason ends a unit, not the request; only an abort ends that.
                if part.finish_reason is None or output.finished:
                    continue
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(tokens)
                tokens = []
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StreamLostError(reason))

    async def unit(self, prompt: Any, params: SamplingParams, timeout_s: float) -> list[int]:
        """Feed one unit, wait for its whole answer: at least one id. Raises StreamLostError and
        TimeoutError; the stream has to be ended then."""
        if self._reader.done():
            raise StreamLostError("the stream has ended")
        self._answer = asyncio.get_running_loop().create_future()
        self._inputs.put_nowait(StreamingInput(prompt, params))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer
        finally:
            self._answer = None

    async def end(self) -> None:
        """Leave nothing of the stream in the front end or the core, also when a unit is under way
        or was queued in this very moment. Raises TimeoutError when the engine does not let go.

        Order matters. A closed feed ends an idle stream in order, but lets a running unit finish
        first; an abort cuts that, but misses a unit that is queued and not yet added, which vLLM
        would then add as a fresh request that holds a seat for ever. So: take back what is queued,
        close the feed or abort, then abort until the reader has ended and the front end has no
        state of the request.
        """
        is_idle = self._answer is None
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._inputs.get_nowait()
        if is_idle:
            self._inputs.put_nowait(None)
            await asyncio.wait({self._reader}, timeout=_ABORT_INTERVAL_S)
        async with asyncio.timeout(_END_TIMEOUT_S):
            while not (self._reader.done() and self._forgotten()):
                await self._engine.abort(self._request_id)
                await asyncio.wait({self._reader}, timeout=_ABORT_INTERVAL_S)
                if self._inputs.empty():
                    # A stream whose first unit was taken back knows no other end than its feed's.
                    self._inputs.put_nowait(None)
                await asyncio.sleep(0)

    def _forgotten(self) -> bool:
        return self._request_id not in self._engine.output_processor.external_req_ids
