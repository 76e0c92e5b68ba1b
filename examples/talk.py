"""A conversation from your own code: the published openai SDK, unmodified, and a recording.

    python examples/talk.py URL TOKEN_FILE [RECORDING [REPLY]]
    python examples/talk.py URL TOKEN_FILE [RECORDING [REPLY]] --session ID

Of a sidecar: URL and the file with the admin token are what `duplex serve` prints; a session of
session.yaml is opened there. With --session: one that is there already, as on a cluster. URL is the
gateway's then, ID the session's status.ledgerId, and the file holds the session's own token.

RECORDING is any audio file (PyAV reads it), the shipped one by default; REPLY (reply.wav by
default) gets what the model says, 24 kHz. The session is closed for good at the end.
"""

import argparse
import asyncio
import base64
import io
import sys
import wave
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import av
import httpx
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed, WebSocketException

EXAMPLES = Path(__file__).parent
RATE_HZ = 16_000


class Refused(Exception):
    """The server said no, and why."""


def read_speech(recording: str) -> io.BytesIO:
    """Any audio file as mono samples of 16 bits. Raises OSError, ValueError."""
    with av.open(recording) as file:
        if not file.streams.audio:
            raise ValueError("no sound in it")
        to_speech = av.AudioResampler("s16", "mono", RATE_HZ)
        frames = (*file.decode(audio=0), None)
        pieces = [piece for frame in frames for piece in to_speech.resample(frame)]
        return io.BytesIO(b"".join(piece.to_ndarray().tobytes() for piece in pieces))


def open_session(url: str, admin_token: str) -> tuple[str, str]:
    """What an operator does on a cluster: a session of that manifest, a name and a token for it."""
    session, token = f"talk-{token_hex(4)}", token_hex(16)
    answer = httpx.put(
        f"{url}/admin/v1/sessions/{session}",
        headers={"Authorization": f"Bearer {admin_token}"},
        json={"manifest": (EXAMPLES / "session.yaml").read_text(), "token": token},
    )
    if answer.is_error:
        raise Refused(reason_of(answer))
    return session, token


def reason_of(answer: httpx.Response) -> str:
    """A sentence, or which field of the manifest is wrong."""
    try:
        error = answer.json()["error"]
        problems = (f"{each['path']}: {each['message']}" for each in error.get("problems", ()))
        return error.get("message") or "; ".join((error["code"], *problems))
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{answer.status_code} {answer.reason_phrase}"


async def talk(
    url: str, session: str, token: str, speech: io.BytesIO, reply: wave.Wave_write
) -> None:
    """Raises Refused."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=token)
    async with client.realtime.connect(model="duplex", extra_query={"session": session}) as live:
        heard = {"format": {"type": "audio/pcm", "rate": RATE_HZ}}
        format_taken = asyncio.Event()

        async def speak() -> None:
            # Where the connection is closed meanwhile, why is among what has been received.
            with suppress(ConnectionClosed):
                await live.session.update(session={"type": "realtime", "audio": {"input": heard}})
                await format_taken.wait()
                while samples := speech.read(2 * RATE_HZ // 10):
                    await live.input_audio_buffer.append(audio=base64.b64encode(samples).decode())
                    await asyncio.sleep(0.1)
                await live.input_audio_buffer.commit()
                await live.send({"type": "session.close"})  # after what was sent has been answered

        speaking = asyncio.create_task(speak())
        async for event in live:
            if event.type == "session.updated":
                format_taken.set()
            elif event.type == "response.output_audio.delta":
                reply.writeframes(base64.b64decode(event.delta))
            elif event.type == "response.output_audio_transcript.done":
                print(f"reply: {event.transcript!r}")
            elif event.type == "duplex.unit":
                print(f"unit {event.unit}: {event.decision} in {event.wall_ms:.0f} ms")
            elif event.type == "session.queued":
                print("waiting for a replica")
            elif event.type == "error":
                raise Refused(f"{event.error.code}: {event.error.message}")
            elif event.type == "session.closed":
                if event.reason != "session_ended":
                    raise Refused(f"{event.reason}: {event.message}")
                speaking.cancel()
                return
        raise Refused("the connection was closed before the session had ended")


def complain(sentence: str, status: int = 2) -> int:
    print(sentence, file=sys.stderr)
    return status


def main(url: str, token_file: str, recording: str, reply_file: str, session: str | None) -> int:
    url = url.rstrip("/")
    try:
        token = Path(token_file).read_text(encoding="ascii").strip()
        speech = read_speech(recording)
        Path(reply_file).open("ab").close()  # before a session is opened for it
        if session is None:
            session, token = open_session(url, token)
        with wave.open(reply_file, "wb") as reply:
            reply.setparams((1, 2, 24_000, 0, "NONE", ""))
            asyncio.run(talk(url, session, token, speech, reply))
    except UnicodeDecodeError:
        return complain(f"{token_file} holds no token")
    except Refused as error:
        return complain(f"{url}: {error}", 1)
    except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
        return complain(f"{url}: {str(error).partition(chr(10))[0] or type(error).__name__}")
    except OSError as error:
        return complain(f"{error.filename or url}: {error.strerror or error}")
    except ValueError as error:
        return complain(f"{recording} is no recording: {getattr(error, 'strerror', error)}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        usage="python examples/talk.py URL TOKEN_FILE [RECORDING [REPLY]] [--session ID]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url")
    parser.add_argument("token_file")
    parser.add_argument("recording", nargs="?", default=EXAMPLES / "audio" / "conversation.flac")
    parser.add_argument("reply", nargs="?", default="reply.wav")
    parser.add_argument("--session")
    given = parser.parse_args()
    sys.exit(main(given.url, given.token_file, str(given.recording), given.reply, given.session))
