"""What stands between HTTP and the studios: the voices by name, one request while it is spoken, and the figures."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import prometheus_client as prometheus
from fastapi import Request

from f5kit.inference import Voice
from f5kit.keys import Keys, Limits
from f5kit.speech import Speech
from f5kit.studio import Busy, Job, Studio
from f5kit.vocoder import GriffinLim

_log = logging.getLogger("f5kit.serve")


class Unknown(Exception):
    """No voice has the name that was asked for."""


class Meters:
    """What Prometheus reads."""

    def __init__(self, studios: dict):
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)  # memory, processor time, open files
        self.requests = prometheus.Counter("f5kit_requests", "Requests by path and status", ["path", "status"],
                                           registry=registry)  # fmt: skip
        self.audio = prometheus.Counter("f5kit_audio_seconds", "Seconds of speech made", registry=registry)
        self.characters = prometheus.Counter("f5kit_characters", "Characters spoken", registry=registry)
        self.factor = prometheus.Histogram(
            "f5kit_real_time_factor", "Seconds from request to end for each second of speech, waiting included",
            buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 50), registry=registry,
        )  # fmt: skip
        self.first = prometheus.Histogram("f5kit_first_sound_seconds", "Seconds from request to the first sound",
                                          buckets=(0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60), registry=registry)  # fmt: skip
        self.together = prometheus.Histogram("f5kit_pieces_per_pass", "Pieces that shared a pass of the model",
                                             buckets=(1, 2, 4, 8, 16, 32), registry=registry)  # fmt: skip
        for name, read in (("waiting", lambda: sum(s.waiting for s in studios.values())),
                           ("speaking", lambda: sum(s.speaking for s in studios.values())),
                           ("device_memory_bytes", _device_memory)):  # fmt: skip
            prometheus.Gauge(f"f5kit_{name}", f"Now: {name.replace('_', ' ')}", registry=registry).set_function(read)


def _device_memory() -> float:
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0.0


def usual_company(voices: Iterable[Voice]) -> tuple[int, int]:
    """(requests that share a pass of the model, passes side by side) on the device of these voices.

    A processor gains nothing by shared passes, and a fifth by a second one, which computes while the first one's
    threads wait for each other. And Griffin-Lim's iterations turn the rounding by which mels of a shared pass differ,
    some 1e-6, into 1e-3 of full scale: there a seed would not give the same samples alone and in company.
    """
    voices = list(voices)
    if any(voice.model.device.type == "cpu" for voice in voices):
        return 1, 2
    return (1 if any(isinstance(voice.vocoder, GriffinLim) for voice in voices) else 8), 1


class Service:
    """The voices of a server, by name, and what they are spoken with."""

    def __init__(self, voices: dict[str, Voice], keys: Keys, limits: Limits, batch: int | None, log_texts: bool):
        self.voices, self.keys, self.limits, self.log_texts = voices, keys, limits, log_texts
        self.paths: tuple[str, ...] = ()  # that there are; all others are counted as one
        self.studios: dict = {}
        self.meters = Meters(self.studios)
        for device in {voice.model.device for voice in voices.values()}:
            usual = usual_company(voice for voice in voices.values() if voice.model.device == device)
            size, lanes = (batch, 1) if batch else usual
            self.studios[device] = Studio(size, limits.waiting, self.meters.together.observe, lanes)

    def studio(self, voice: Voice) -> Studio:
        return self.studios[voice.model.device]

    def start(self) -> None:
        """Warm every voice up."""
        for voice in self.voices.values():
            self.studio(voice).prepare(voice)

    def stop(self) -> None:
        for studio in self.studios.values():
            studio.stop()

    def voice(self, name: str | None) -> Voice:
        """The voice of that name, the first without one. Raises Unknown for a name that nobody has."""
        if name is None:
            return next(iter(self.voices.values()))
        if name not in self.voices:
            raise Unknown(f"no voice has this name; there are {', '.join(self.voices)}")
        return self.voices[name]

    def record(self, entry: dict) -> None:
        """Count and log a request that is over. Texts are in the log only when that was asked for."""
        path = entry["path"] if entry["path"] in self.paths else "other"
        self.meters.requests.labels(path, str(entry["status"])).inc()
        kept = {key: value for key, value in entry.items() if key != "text" or self.log_texts}
        _log.info(json.dumps({"time": round(time.time(), 3), **kept, "path": path}))


class Take:
    """One request while it is spoken: pieces come from the speaker's thread into the server's loop."""

    def __init__(self, service: Service, request: Request, job: Job, studio: Studio):
        self.service, self.request, self.job, self.started = service, request, job, time.monotonic()
        self.entry, self.owner = request.scope["entry"], request.scope["owner"]
        self.pieces: asyncio.Queue = asyncio.Queue()
        loop, self.seconds, self.first = asyncio.get_running_loop(), 0.0, None

        def tell(piece) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it whoever listened
                loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

        job.tell = tell
        self.entry |= {"characters": len(job.text), "text": job.text}
        service.keys.count_characters(self.owner, len(job.text))
        try:
            studio.submit(job)
        except Busy:
            service.keys.give_back(self.owner, len(job.text))
            raise
        self.left = asyncio.create_task(self._leaves())

    async def _leaves(self) -> None:
        """Cancel the job when the client leaves."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.entry["left"] = True
        self.job.cancel.set()

    async def __aiter__(self) -> AsyncIterator[Speech]:
        """The pieces of speech. Raises what went wrong."""
        try:
            while (piece := await self.pieces.get()) is not None:
                if isinstance(piece, Exception):
                    if self.first is None:  # nothing was heard of it
                        self.service.keys.give_back(self.owner, len(self.job.text))
                    raise piece
                self.first = self.first or time.monotonic() - self.started
                self.seconds += piece.seconds
                yield piece
            self._count()
            self.left.cancel()
        finally:
            self.job.cancel.set()
            self.left.cancel()

    def _count(self) -> None:
        meters, took = self.service.meters, time.monotonic() - self.started
        meters.audio.inc(self.seconds)
        meters.characters.inc(len(self.job.text))
        meters.first.observe(self.first)
        meters.factor.observe(took / max(self.seconds, 0.01))
        self.entry |= {"audio_seconds": round(self.seconds, 3), "first_sound": round(self.first, 4)}
