"""A conversation from your own code: the published openai SDK, unmodified, and a recording.

    python examples/talk.py URL ADMIN_TOKEN_FILE RECORDING [REPLY]

URL and the admin token's file are what `duplex serve` prints. RECORDING is a mono 16-bit WAV file;
REPLY (reply.wav by default) gets what the model says, 24 kHz.
"""

import asyncio
import base64
import sys
import wave
from pathlib import Path
from secrets import token_hex

import httpx
from openai import AsyncOpenAI
from websockets.exceptions import WebSocketException

MANIFEST = Path(__file__).with_name("session.yaml").read_text()


def open_session(url: str, admin_token: str) -> tuple[str, str]:
    """What an operator does on a cluster: a session of that manifest, a name and a token for it."""
    session, token = f"talk-{token_hex(4)}", token_hex(16)
    httpx.put(
        f"{url}/admin/v1/sessions/{session}",
        headers={"Authorization": f"Bearer {admin_token}"},
        json={"manifest": MANIFEST, "token": token},
    ).raise_for_status()
    return session, token


async def talk(
    url: str, session: str, token: str, speech: wave.Wave_read, reply: wave.Wave_write
) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=token)
    async with client.realtime.connect(model="duplex", extra_query={"session": session}) as live:
        rate_hz = speech.getframerate()
        heard = {"format": {"type": "audio/pcm", "rate": rate_hz}}
        await live.session.update(session={"type": "realtime", "audio": {"input": heard}})

        async def speak() -> None:
            while samples := speech.readframes(rate_hz // 10):
                await live.input_audio_buffer.append(audio=base64.b64encode(samples).decode())
                await asyncio.sleep(0.1)
            await live.input_audio_buffer.commit()
            await live.send({"type": "session.close"})  # after what was sent has been answered

        speaking = asyncio.create_task(speak())
        async for event in live:
            if event.type == "response.output_audio.delta":
                reply.writeframes(base64.b64decode(event.delta))
            elif event.type == "response.output_audio_transcript.done":
                print(f"reply: {event.transcript!r}")
            elif event.type == "duplex.unit":
                print(f"unit {event.unit}: {event.decision} in {event.wall_ms:.0f} ms")
            elif event.type == "error":
                print(f"{event.error.code}: {event.error.message}", file=sys.stderr)
        await speaking


def complain(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def main(url: str, token_file: str, recording: str, reply_file: str = "reply.wav") -> int:
    url = url.rstrip("/")
    try:
        admin_token = Path(token_file).read_text(encoding="ascii").strip()
        with wave.open(recording) as speech:
            if (speech.getnchannels(), speech.getsampwidth()) != (1, 2):
                return complain(f"{recording} is not mono with 16 bits a sample")
            Path(reply_file).open("ab").close()  # before a session is opened for it
            session, token = open_session(url, admin_token)
            with wave.open(reply_file, "wb") as reply:
                reply.setparams((1, 2, 24_000, 0, "NONE", ""))
                asyncio.run(talk(url, session, token, speech, reply))
    except UnicodeDecodeError:
        return complain(f"{token_file} holds no admin token")
    except (wave.Error, EOFError) as error:
        return complain(f"{recording} is no WAV file: {str(error) or 'it ends too early'}")
    except (httpx.HTTPError, httpx.InvalidURL, WebSocketException) as error:
        return complain(f"{url}: {str(error).partition(chr(10))[0] or type(error).__name__}")
    except OSError as error:
        return complain(f"{error.filename or url}: {error.strerror or error}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(complain(str(__doc__)))
    sys.exit(main(*sys.argv[1:]))
