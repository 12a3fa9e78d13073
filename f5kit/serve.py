"""Voices over HTTP: one line in a notebook, or one command.

    server = serve(voice)          # in the background, on http://127.0.0.1:8000
    server.stop()

    python -m f5kit.serve --voice anna=runs/anna --voice starter=starter
    python -m f5kit.serve --new-key phone          # a key for another machine, and what the server needs of it

Only this machine can call it. For any other address keys are needed (`keys`), and there belongs a proxy with TLS in
front. Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from f5kit.errors import UserError
from f5kit.host import secret
from f5kit.keys import SECRET, Keys, Limits, new_key

if TYPE_CHECKING:
    from f5kit.inference import Voice

LOOPBACK = ("127.0.0.1", "::1", "localhost")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Server:
    """A server that runs in the background until `stop`. Made by `serve`; also a context manager."""

    def __init__(self, server, sock: socket.socket, url: str, voices: Sequence[str]):
        self.url, self.voices, self._server = url, tuple(voices), server
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(sock,), daemon=True)
        self._thread.start()
        while not server.started and self._thread.is_alive():
            self._thread.join(0.02)
        if self._failed is not None or not server.started:
            raise self._failed or RuntimeError("the server did not start; its log says why")

    def _run(self, sock: socket.socket) -> None:
        try:
            self._server.run(sockets=[sock])
        except BaseException as error:  # told by the thread that waits
            self._failed = error
        finally:
            sock.close()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Let what is being spoken end (`Limits.grace`), take nothing more, and free the port. Can be called again."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "speaks" if self.running else "has stopped"
        return f"Server({', '.join(self.voices)}; {self.url} {state}, {self.url}/docs describes it)"


def serve(
    voices: Voice | dict[str, Voice],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    keys: str | None = None,
    batch: int | None = None,
    log_texts: bool = False,
) -> Server:
    """Serve a voice (as "voice") or several by name, in a background thread; returns when it can be called.

    keys: "name:sha256 ...", by default the secret F5KIT_API_KEYS; without any, only loopback addresses are served. port
    0 takes a free one. batch: requests that share a pass of the model, by default 8 on a GPU; on a CPU none do, and two
    are spoken side by side. The log "f5kit.serve" gets a line of JSON for each request, with texts only where
    `log_texts` says so.
    Raises UserError for a taken port, an address without keys, names that are none, and without the extra `serve`.
    """
    server, sock, url, names = _build(voices, host, port, limits or Limits(), keys, batch, log_texts)
    return Server(server, sock, url, names)


def _build(voices, host: str, port: int, limits: Limits, keys: str | None, batch: int | None, log_texts: bool):
    """(uvicorn's server, its socket, its address, the names of the voices)."""
    uvicorn, routes, gate = _import_extra()
    voices = voices if isinstance(voices, dict) else {"voice": voices}
    for name in voices or [""]:
        if not NAME.fullmatch(name):
            raise UserError(f"a voice is called {name!r}; give a name of letters, digits, dots, dashes, underscores")
    known = Keys(secret(SECRET) if keys is None else keys, limits)
    if host not in LOOPBACK and not known:
        raise UserError(f"{host} can be reached from other machines, and there are no keys: make one with "
                        f"python -m f5kit.serve --new-key NAME and put its entry into the secret {SECRET}, "
                        "or serve 127.0.0.1")  # fmt: skip
    sock = _listen(host, port)
    service = routes.Service(voices, known, limits, batch, log_texts)
    try:
        service.start()
    except BaseException:
        service.stop()
        sock.close()
        raise
    config = uvicorn.Config(
        routes.create_app(service, own_names=not known), http=gate.patient_protocol(limits.arrival), ws="none",
        lifespan="on", access_log=False, log_config=None, server_header=False, proxy_headers=False,
        limit_concurrency=limits.connections, timeout_graceful_shutdown=int(limits.grace) or 1,
    )  # fmt: skip
    port = sock.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    return uvicorn.Server(config), sock, f"http://{shown}:{port}", list(voices)


def _import_extra():
    try:
        import python_multipart  # noqa: F401  (which forms need)
        import uvicorn

        from f5kit import gate, routes
    except ImportError as error:
        raise UserError(f"serving needs {error.name}, of the extra serve: pip install 'f5kit[serve]'") from None
    return uvicorn, routes, gate


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{host}, port {port}, can't be had ({why}): choose another, 0 for a free one") from None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m f5kit.serve", description=__doc__.split("\n")[0])
    parser.add_argument("--voice", action="append", default=[], metavar="NAME=SOURCE",
                        help="a run folder, checkpoint, export, preset or user/name of the Hub; may be repeated")
    parser.add_argument("--host", default="127.0.0.1", help="with keys, another address than loopback")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", help="cuda, mps or cpu; by default the best")
    parser.add_argument("--precision", default="auto", help="fp32, bf16, fp16 or auto")
    parser.add_argument("--batch", type=int, help="requests that share a pass of the model")
    parser.add_argument("--log-texts", action="store_true", help="put what is said into the log")
    parser.add_argument("--new-key", metavar="NAME", help="make a key, show it once, and end")
    kinds = {name: type(value) for name, value in vars(Limits()).items()}
    for name, kind in kinds.items():
        shown = f"--{name.replace('_', '-')}"
        parser.add_argument(shown, type=kind, default=getattr(Limits(), name), help="a limit; %(default)s by default")
    given = parser.parse_args(arguments)
    if given.new_key:
        key, entry = new_key(given.new_key)
        print(f"for its owner, shown only now:  {key}\nadd to {SECRET}:       {entry}")
        return
    from f5kit.inference import Voice  # not for a key alone: it brings torch

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    limits = Limits(**{name: getattr(given, name) for name in kinds})
    pairs = [entry.partition("=") for entry in given.voice]
    if not pairs or not all(source for _, _, source in pairs):
        parser.error("name at least one voice, as in --voice anna=runs/anna")
    how = {"device": given.device, "precision": given.precision}
    voices = {name: Voice.load(source, **how) for name, _, source in pairs}
    server, sock, url, names = _build(voices, given.host, given.port, limits, None, given.batch, given.log_texts)
    print(f"{', '.join(names)}: {url}, described at {url}/docs; Ctrl-C stops it", flush=True)
    with sock:
        server.run(sockets=[sock])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn stops in grace, then raises the signal once more
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
    except UserError as error:
        sys.exit(str(error))
