"""What stands before the server's answers: who may pass, how much may arrive and how slowly.

`Gate` is plain ASGI: it looks at a request's head before anything is read, and hands its body on once that is whole.
`patient_protocol` is uvicorn's, with an end to its patience. Nothing of a request is written down but what `record`
gets: no query, no key, no text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from f5kit.keys import Keys, Limits, Refused

OPEN = ("/health", "/docs", "/openapi.json")  # say nothing about voices or callers
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
OTHER_BODIES = 1_000_000  # bytes of a request that carries no recording
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str) -> dict:
    """The one form of error that the server answers, that of OpenAI's API."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class Refusal(Exception):
    """A request that is answered here."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class Gone(Exception):
    """The client left before its request was whole."""


class Gate:
    """ASGI middleware around an app. `record` gets a dict about every request when it is over; what endpoints put into
    scope["entry"] is in it. With `own_names`, requests must name this machine as their host: without keys, that keeps
    web pages out that point a name of their own at it.
    """

    def __init__(self, app, keys: Keys, limits: Limits, own_names: bool, record: Callable[[dict], None]):
        self.app, self.keys, self.limits, self.own_names, self.record = app, keys, limits, own_names, record

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = time.monotonic()
        entry = scope["entry"] = {"key": None, "method": scope["method"], "path": scope["path"][:64], "status": 0}

        async def noting(message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
                own = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        try:
            scope["owner"] = entry["key"] = self._pass(scope)
            await self.app(scope, await self._whole_body(scope, receive), noting)
        except Refusal as refusal:
            await self._refuse(refusal, noting)
        except Gone:
            entry["status"] = 499  # nobody is there to be answered
        finally:
            if entry.pop("left", False):
                entry["status"] = 499
            self.record({**entry, "seconds": round(time.monotonic() - started, 4)})

    def _pass(self, scope) -> str | None:
        """The owner of the request's key, or a Refusal."""
        head = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["query_string"]:
            raise Refusal(400, "this server reads nothing from the URL's query; a key goes into the header "
                               "Authorization: Bearer, and one that was in a URL should be replaced")  # fmt: skip
        host = head.get("host", "")
        if self.own_names and _without_port(host) not in OWN_NAMES:
            raise Refusal(403, "without keys this server answers to the names of its own machine alone")
        origin = head.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(403, "pages of other sites may not call this server")
        if scope["path"] in OPEN:
            return None
        scheme, _, key = head.get("authorization", "").partition(" ")
        owner = self.keys.owner(key.strip() if scheme.lower() == "bearer" else None)
        if owner is None:
            raise Refusal(401, "a valid key is needed in the header Authorization: Bearer",
                          {"www-authenticate": "Bearer"})  # fmt: skip
        if scope["method"] == "POST":
            try:
                self.keys.count_request(owner)
            except Refused as refused:
                raise Refusal(429, str(refused), {"retry-after": str(refused.seconds)}) from None
        return owner

    async def _whole_body(self, scope, receive):
        """A `receive` that gives the whole body at once, and later what comes after it.

        It is read here, up to its limit, so that no endpoint holds anything while a body trickles in.
        """
        recording = scope["path"] == "/tts"
        most = int(self.limits.upload_mb * 1e6) * recording + OTHER_BODIES
        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        too_large = Refusal(413, f"the request has more than {most:,} bytes", {"connection": "close"})
        if sizes and int(sizes[0]) > most:
            raise too_large
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most:
                raise too_large
        waiting = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay():
            return waiting.pop() if waiting else await receive()

        return replay

    async def _refuse(self, refusal: Refusal, send) -> None:
        body = json.dumps(error_body(refusal.status, str(refusal))).encode()
        head = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        headers = [(name.encode(), value.encode()) for name, value in head.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _without_port(host: str) -> str:
    """The name in a Host header: "[::1]:8000" is "[::1]"."""
    name = host.lower()
    return name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]


def patient_protocol(patience: float):
    """uvicorn's protocol for HTTP/1.1, which closes a connection whose request has not arrived whole within so many
    seconds, or whose client has taken nothing of its answer for as long. uvicorn by itself waits without end."""
    from uvicorn.protocols.http.h11_impl import H11Protocol, h11

    class PatientProtocol(H11Protocol):
        _arriving = _leaving = None

        def __init__(self, *given, **named) -> None:
            super().__init__(*given, **named)
            self.access_log = False  # uvicorn's would write queries down, and with them keys

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._arriving = self.loop.call_later(patience, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            between = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
            arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not between
            if not arriving and self._arriving is not None:
                self._arriving.cancel()
                self._arriving = None
            elif arriving and self._arriving is None:
                self._arriving = self.loop.call_later(patience, self._give_up)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._leaving = self.loop.call_later(patience, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._leaving is not None:
                self._leaving.cancel()

        def connection_lost(self, exc) -> None:
            for timer in (self._arriving, self._leaving):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def _give_up(self) -> None:
            self._arriving = None
            if self.transport.is_closing():
                return
            if self.cycle is None or not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    return PatientProtocol
