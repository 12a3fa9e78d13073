"""Who may speak, and how much: API keys, and the rates and quotas of each.

A key is 256 random bits. The server knows its sha256 alone, which nobody can turn back: no slow hash is needed, for
there is nothing to guess. Keys come as the secret F5KIT_API_KEYS, "name:sha256 name:sha256", from the environment or
the secret store of Colab or Kaggle.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from f5kit.errors import UserError

SECRET = "F5KIT_API_KEYS"
_ENTRY = re.compile(r"([A-Za-z0-9_.-]{1,64}):([0-9a-f]{64})")
_DAY = 86_400


@dataclass(frozen=True)
class Limits:
    """What a server takes. Raises UserError for a limit that is not positive."""

    text: int = 5_000
    """Characters of one request, about six minutes of speech."""
    steps: int = 64
    """Of the solver."""
    upload_mb: float = 10.0
    """Of a reference, in units of 10**6 bytes."""
    upload_seconds: float = 60.0
    """Of a reference before it is cut."""
    arrival: float = 30.0
    """Seconds in which a request has to arrive whole, and in which its client has to take what waits for it."""
    waiting: int = 32
    """Requests that wait for the device; beyond them, 429."""
    connections: int = 200
    """Open ones; beyond them, 503."""
    requests_per_minute: int = 60
    """Of each key."""
    characters_per_day: int = 200_000
    """Of each key, from midnight to midnight UTC, counted since the server started."""
    grace: float = 30.0
    """Seconds that requests have to end in when the server stops."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"the limit {name} is {value}; give more than 0")


def new_key(name: str) -> tuple[str, str]:
    """(key, entry): the key is for its owner and is kept nowhere; the entry goes into F5KIT_API_KEYS."""
    key = f"f5k_{secrets.token_urlsafe(32)}"
    entry = f"{name}:{_hash(key)}"
    if not _ENTRY.fullmatch(entry):
        raise UserError(f"the name of a key is {name!r}; take up to 64 letters, digits, dots, dashes and underscores")
    return key, entry


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Refused(Exception):
    """A caller has had enough for now: `seconds` say when to come back."""

    def __init__(self, message: str, seconds: float):
        super().__init__(message)
        self.seconds = max(1, int(seconds + 0.999))


class Keys:
    """The keys of a server and what each has used. Without entries everybody is "local", without rate or quota.

    `clock` gives seconds since 1970; tests put another one in its place. Raises UserError for entries that are none.
    """

    def __init__(self, entries: str | None, limits: Limits, clock: Callable[[], float] = time.time):
        self.limits, self._clock, self._lock = limits, clock, threading.Lock()
        self._hashes: dict[str, str] = {}
        for number, entry in enumerate((entries or "").replace(",", " ").split(), 1):
            found = _ENTRY.fullmatch(entry)
            if not found:  # a key that was put there by mistake is not repeated
                raise UserError(f"entry {number} of {SECRET} is not name:sha256; make one with "
                                "python -m f5kit.serve --new-key NAME")  # fmt: skip
            self._hashes[found[1]] = found[2]
        self._tokens: dict[str, tuple[float, float]] = {}
        self._used: dict[str, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def owner(self, key: str | None) -> str | None:
        """The name a key belongs to, None for a wrong or missing one; "local" where no keys are asked for."""
        if not self._hashes:
            return "local"
        given, owner = _hash(key or ""), None
        for name, known in self._hashes.items():  # all of them, so that time tells nothing
            owner = name if hmac.compare_digest(given, known) else owner
        return owner if key else None

    def count_request(self, owner: str) -> None:
        """Count a request. Raises Refused beyond `requests_per_minute`, which may come at once or spread out."""
        if not self._hashes:
            return
        most = self.limits.requests_per_minute
        with self._lock:
            now = self._clock()
            tokens, then = self._tokens.get(owner, (float(most), now))
            tokens = min(most, tokens + (now - then) * most / 60)
            if tokens < 1:
                raise Refused(f"more than {most} requests a minute", (1 - tokens) * 60 / most)
            self._tokens[owner] = tokens - 1, now

    def count_characters(self, owner: str, characters: int) -> None:
        """Count what is to be spoken. Raises Refused beyond `characters_per_day`."""
        if not self._hashes:
            return
        with self._lock:
            now = self._clock()
            day, used = self._used.get(owner, (0, 0))
            today = int(now // _DAY)
            used = used if day == today else 0
            if used + characters > self.limits.characters_per_day:
                left = self.limits.characters_per_day - used
                raise Refused(f"{characters} characters, and {left} are left for today", _DAY - now % _DAY)
            self._used[owner] = today, used + characters

    def give_back(self, owner: str, characters: int) -> None:
        """Take back what was counted for a text that was not spoken."""
        with self._lock:
            day, used = self._used.get(owner, (0, 0))
            self._used[owner] = day, max(0, used - characters)
