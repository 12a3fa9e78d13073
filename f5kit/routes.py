"""The HTTP face of voices: what is asked, what is answered, what is counted. `serve` starts it, `gate` guards it.

Annotations are objects here, not strings: FastAPI reads the limits of a server from them.
"""

import asyncio
import base64
import json
import tempfile
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import prometheus_client as prometheus
from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException

from f5kit.audio import decode
from f5kit.errors import UserError
from f5kit.gate import Gate, error_body
from f5kit.inference import FIRST_CHUNK, Voice
from f5kit.keys import Limits, Refused
from f5kit.media import AUDIO_SUFFIXES, open_sound
from f5kit.provenance import kit, model_name
from f5kit.service import Service, Take, Unknown
from f5kit.sounds import MEDIA_TYPES, Encoder, encode
from f5kit.speech import Cancelled, Speech, join_speech
from f5kit.studio import Busy, Job, is_shortage

HIGHEST_RATE = 192_000  # Hz of an upload


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    error: ErrorDetail


class VoiceInfo(BaseModel):
    name: str
    model: str
    reference_seconds: float
    sample_rate: int
    precision: str


class Voices(BaseModel):
    voices: list[VoiceInfo]


class Health(BaseModel):
    status: Literal["ok"]
    version: str
    waiting: int
    speaking: int


_TOLD = {400: "Malformed, or something stood in the URL's query", 401: "Without a valid key",
         403: "From another site's page, or by another name of this machine", 408: "Arrived too slowly",
         413: "Larger than this server takes", 422: "A value out of range, or a text or recording that can't serve",
         429: "Too many requests at once, a minute or a day: come back after Retry-After seconds",
         503: "Out of memory, or the server stops"}  # fmt: skip
REFUSALS = {status: {"model": Error, "description": text} for status, text in _TOLD.items()}
UNKNOWN_VOICE = {404: {"model": Error, "description": "No voice has this name"}}
SOUND = {200: {"description": "The speech, with where it comes from in the file and in X-Provenance",
               "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA_TYPES.values()}
                          }}  # fmt: skip
EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}}


def create_app(service: Service, own_names: bool) -> Callable:
    """The ASGI app of a service. `own_names`: whether requests must call this machine by its own names (`Gate`)."""

    @asynccontextmanager
    async def lifespan(app):
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="f5kit", version=kit().split()[1], lifespan=lifespan, redoc_url=None,
                  description="Voices over HTTP. Sounds are mono; a seed says the same thing the same way.",
                  redirect_slashes=False)  # fmt: skip
    _add_speaking(app, service)
    _add_looking(app, service)
    _add_errors(app)
    _describe_keys(app, bool(service.keys))
    service.paths = tuple(route.path for route in app.routes)
    return Gate(app, service.keys, service.limits, own_names, service.record)


def _add_speaking(app: FastAPI, service: Service) -> None:
    limits, usual_steps = service.limits, min(16, service.limits.steps)
    names = {"min_length": 1, "max_length": 64}

    @app.post("/tts", response_class=Response, responses=SOUND | REFUSALS | UNKNOWN_VOICE, summary="Say a text")
    async def tts(
        request: Request,
        gen_text: Annotated[str, Form(min_length=1, max_length=limits.text, examples=["Good evening."],
                                      description="What to say")],
        voice: Annotated[str | None, Form(**names, description="A name of GET /voices; by default the first")] = None,
        reference: Annotated[UploadFile, File(json_schema_extra={"format": "binary"},
                                              description="A recording to continue in place of the voice's")] = None,
        ref_text: Annotated[str | None, Form(max_length=1000, description="Its words; else transcribed")] = None,
        nfe_step: Annotated[int, Form(ge=1, le=limits.steps, description="Steps of the solver")] = usual_steps,
        cfg_strength: Annotated[float, Form(ge=0, le=10, allow_inf_nan=False, description="Guidance")] = 2.0,
        speed: Annotated[float, Form(ge=0.25, le=4, allow_inf_nan=False, description="2 takes half as long")] = 1.0,
        seed: Annotated[int, Form(ge=0, le=2**53 - 1)] = 0,
        use_fp16: Annotated[bool, Form(description="Half precision where this device gains by it; else fp32")] = True,
        format: Annotated[Literal["wav", "flac", "mp3", "opus", "pcm"], Form()] = "wav",
        stream: Annotated[bool, Form(description="Send each chunk as soon as it is made; FLAC comes whole")] = False,
    ):  # fmt: skip
        settings = {"steps": nfe_step, "cfg_strength": cfg_strength, "speed": speed, "seed": seed}
        upload = await read_upload(reference, limits) if reference and reference.filename else None
        if ref_text and not upload:
            raise UserError("ref_text is the words of an uploaded reference, and there is none: send both, or neither")
        take = _begin(service, request, voice, gen_text, settings, (upload, ref_text), use_fp16, stream)
        return await (_stream(take, format) if stream else _whole(take, format))

    spoken = create_model(
        "SpeechRequest", __config__=ConfigDict(strict=True),  # else a seed of true would be 1
        input=(str, Field(min_length=1, max_length=limits.text, examples=["Good evening."])),
        voice=(str, Field(**names, examples=[next(iter(service.voices))])),
        model=(str, Field("f5kit", max_length=64, description="Of no effect: a voice has its own model")),
        response_format=(Literal["mp3", "wav", "flac", "opus", "pcm"], "mp3"),
        speed=(float, Field(1.0, ge=0.25, le=4, allow_inf_nan=False)),
        stream_format=(Literal["audio", "sse"], "audio"),
        seed=(int, Field(0, ge=0, le=2**53 - 1, description="Beyond OpenAI's form")),
        nfe_step=(int, Field(usual_steps, ge=1, le=limits.steps, description="Beyond OpenAI's form")),
    )

    @app.post("/v1/audio/speech", response_class=Response, responses=_with_events() | REFUSALS | UNKNOWN_VOICE,
              summary="Say a text, in the form of OpenAI's API")  # fmt: skip
    async def speech(request: Request, body: spoken):
        settings = {"steps": body.nfe_step, "speed": body.speed, "seed": body.seed}
        take = _begin(service, request, body.voice, body.input, settings, (None, None), True, True)
        return await (_events if body.stream_format == "sse" else _stream)(take, body.response_format)


def _with_events() -> dict:
    return {200: {**SOUND[200], "content": SOUND[200]["content"] | EVENTS}}


def _begin(service: Service, request: Request, name, text, settings, recording, half: bool, live: bool) -> Take:
    """Hand a text to the queue. Raises Unknown, and HTTPException 429."""
    voice = service.voice(name)

    def ready() -> Voice:
        chosen = _refer_to(voice, *recording) if recording[0] else voice.with_reference(voice.reference)
        chosen.precision = voice.precision if half else "fp32"
        return chosen

    request.scope["entry"]["voice"] = name or next(iter(service.voices))
    job = Job(ready, text, settings, tell=print, first=FIRST_CHUNK if live else None, cancel=threading.Event())
    try:
        return Take(service, request, job, service.studio(voice))
    except (Busy, Refused) as error:
        headers = {"retry-after": str(error.seconds)}
        raise HTTPException(429, f"{error}; try again in {error.seconds} s", headers) from None


async def read_upload(upload: UploadFile, limits: Limits) -> tuple[bytes, str]:
    """(content, suffix). Raises UserError for more than `upload_mb`. The name that came with it is not used."""
    data = await upload.read()
    if len(data) > limits.upload_mb * 1e6:
        raise HTTPException(413, f"the reference has more than {limits.upload_mb:g} MB")
    suffix = Path(upload.filename or "").suffix.lower()
    suffix = suffix if suffix in AUDIO_SUFFIXES else ".wav"
    await asyncio.to_thread(check_sound, data, suffix, limits.upload_seconds)
    return data, suffix


def check_sound(data: bytes, suffix: str, seconds: float) -> None:
    """Raise UserError for what is no recording, is too long, or would fill the memory when it is unpacked."""
    name = f"the reference{suffix}"
    if (rate := open_sound(data, name).rate) > HIGHEST_RATE:
        raise UserError(f"{name} has {rate} samples a second, over {HIGHEST_RATE}; resample it")
    decode(data, seconds, name)


def _refer_to(voice: Voice, upload: tuple[bytes, str], text: str | None) -> Voice:
    data, suffix = upload
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"the reference{suffix}"
        file.write_bytes(data)
        return voice.refer_to(file, text)


# ---- Answers


def _headers(piece: Speech) -> dict[str, str]:
    return {"x-seed": str(piece.seed), "x-sample-rate": str(piece.sample_rate),
            "x-provenance": piece.provenance.comment().encode("ascii", "backslashreplace").decode()}  # fmt: skip


async def _whole(take: Take, form: str) -> Response:
    pieces = [piece async for piece in take]
    whole = join_speech(pieces, take.job.text, pieces[0].seed)
    data = await asyncio.to_thread(encode, whole.audio, whole.sample_rate, form, whole.provenance)
    return Response(data, media_type=MEDIA_TYPES[form], headers=_headers(whole))


async def _stream(take: Take, form: str) -> Response:
    """The answer begins with the first piece: what is wrong with the text is still told by a status."""
    pieces = aiter(take)
    first = await anext(pieces)
    encoder = Encoder(form, first.sample_rate, first.provenance, live=True)

    async def parts():
        try:
            if data := encoder.write(first.audio):
                yield data
            async for piece in pieces:
                if data := encoder.write(piece.audio):
                    yield data
            yield encoder.end()
        finally:
            await pieces.aclose()

    return StreamingResponse(parts(), media_type=MEDIA_TYPES[form], headers=_headers(first))


async def _events(take: Take, form: str) -> Response:
    """The same as OpenAI's server-sent events."""
    answer = await _stream(take, form)
    parts = answer.body_iterator

    async def events():
        try:
            async for data in parts:
                told = {"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}
                yield f"data: {json.dumps(told)}\n\n".encode()
            used = {"input_tokens": len(take.job.text), "output_tokens": 0, "total_tokens": len(take.job.text)}
            yield f"data: {json.dumps({'type': 'speech.audio.done', 'usage': used})}\n\n".encode()
        finally:
            await parts.aclose()

    headers = {key: value for key, value in answer.headers.items() if key.startswith("x-")}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _add_looking(app: FastAPI, service: Service) -> None:
    @app.get("/voices", summary="The voices by name", responses=REFUSALS)
    async def voices() -> Voices:
        return Voices(voices=[
            VoiceInfo(name=name, model=model_name(voice.model.origin), precision=voice.precision,
                      reference_seconds=round(len(voice.reference.audio) / voice.model.config.mel.sample_rate, 2),
                      sample_rate=voice.model.config.mel.sample_rate)
            for name, voice in service.voices.items()
        ])  # fmt: skip

    @app.get("/health", summary="Whether it is up, and how busy; needs no key", responses=REFUSALS)
    async def health() -> Health:
        studios = service.studios.values()
        return Health(status="ok", version=app.version, waiting=sum(s.waiting for s in studios),
                      speaking=sum(s.speaking for s in studios))  # fmt: skip

    text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response, responses=text | REFUSALS)
    async def metrics():
        return Response(prometheus.generate_latest(service.meters.registry), media_type=prometheus.CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    """Every error in one form. What a request held is not repeated, what a fault of ours was is not told."""

    def answer(status: int, message: str, headers=None) -> JSONResponse:
        return JSONResponse(error_body(status, message), status, headers)

    @app.exception_handler(HTTPException)
    async def refused(request, error):
        return answer(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Unknown)
    async def unknown(request, error):
        return answer(404, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request, error):
        said = [f"{'.'.join(str(part) for part in e['loc'][1:]) or 'body'}: {e['msg']}" for e in error.errors()]
        malformed = any(e["type"] == "json_invalid" for e in error.errors())
        return answer(400 if malformed else 422, "; ".join(said)[:500])

    @app.exception_handler(Cancelled)
    async def cancelled(request, error):
        return answer(503, "cancelled: the server is stopping", {"retry-after": "5"})

    @app.exception_handler(UserError)
    async def wrong(request, error):
        return answer(422, str(error))

    @app.exception_handler(Exception)
    async def broken(request, error):
        closes = {"connection": "close"}  # which uvicorn does after this; a caller who is not told sends into the void
        if is_shortage(error):
            return answer(503, "the memory was too short for this", {"retry-after": "5"} | closes)
        return answer(500, "a fault of this server; its log has more", closes)


def _describe_keys(app: FastAPI, keys: bool) -> None:
    """Tell the OpenAPI page that a key is needed, where one is."""
    plain = app.openapi

    def openapi() -> dict:
        schema = plain()
        if keys:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, about in schema["paths"].items():
                for operation in about.values() if path != "/health" else ():
                    operation["security"] = [{"key": []}]
        return schema

    app.openapi = openapi
