"""What the notebooks' install cell does once f5kit itself is there: the packages that lack, and none that the host has.

Colab and Kaggle bring torch, numpy, ipywidgets and hundreds more, in builds that belong together. So every package that
is installed is held at its version while pip works, only what f5kit lacks is asked for, and afterwards the imports are
tried in another process: this one may hold modules that are older than their files.

Only the standard library is used, for nothing else can be counted on here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from f5kit.errors import UserError

# Tried after an installation. torchaudio goes by f5kit's own import, which mends a build for another torch.
_IMPORTS = "import torch, f5kit.trainer, f5kit.inference, f5kit.hub, f5kit.widgets, vocos, accelerate, soundfile, soxr"
_NO_NETWORK = ("NewConnectionError", "Temporary failure in name resolution", "Max retries", "ConnectTimeoutError",
               "Network is unreachable", "ProxyError", "No matching distribution found")  # fmt: skip


@dataclass(frozen=True)
class Installed:
    """What `install_missing` did."""

    added: dict[str, str]
    """Name and version of what was installed."""
    kept: int
    """Packages that the host had, every one of them at its version still."""

    def __str__(self) -> str:
        if not self.added:
            return "f5kit finds all it needs here; nothing was installed"
        added = ", ".join(f"{name} {version}" for name, version in self.added.items())
        return f"installed {added}; the {self.kept} packages that were here kept their versions"


def install_missing(
    source: str | None = None, *, extras: tuple[str, ...] = (), verify: bool | None = None
) -> Installed:
    """Install what f5kit requires and this Python lacks.

    source: where f5kit came from; wheels beside a wheel serve without a network. extras: of f5kit, as in ("judge",).
    verify: try the imports in another process (None: when something was installed).
    Raises UserError, with what can be done, when it does not succeed.
    """
    before = installed_versions()
    missing = find_missing(requirements(extras), before)
    if missing:
        _run_pip(missing, before, source)
        importlib.invalidate_caches()
    after = installed_versions()
    changed = {name: after.get(name) for name, version in before.items() if after.get(name) != version}
    if changed:
        name, now = next(iter(changed.items()))
        raise UserError(f"pip changed {name} from {before[name]} to {now}: restart with a fresh runtime")
    if verify or (verify is None and missing):
        verify_imports()
    return Installed({name: after[name] for name in sorted(after.keys() - before.keys())}, len(before))


def installed_versions() -> dict[str, str]:
    """{canonical name: version} of every package that this Python finds, f5kit left out."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version and canonical(name) != "f5kit":
            found.setdefault(canonical(name), version)  # the first one found is the one that is imported
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extras: tuple[str, ...] = ()) -> list[str]:
    """f5kit's requirement lines: those of its metadata, or of the clone's pyproject.toml where it is not installed."""
    clone = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if clone.is_file():
        text = clone.read_text(encoding="utf-8")
        wanted = ["dependencies", *extras]
        blocks = [re.search(rf"^{re.escape(name)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL) for name in wanted]
        return [line for block in blocks if block for line in re.findall(r'"([^"]+)"', block[1])]
    try:
        lines = importlib.metadata.requires("f5kit") or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError("f5kit is here without its metadata: install it with pip, or open a clone of it") from None
    plain = [line for line in lines if "extra ==" not in line]
    added = [line for line in lines for extra in extras if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", line)]
    return [re.sub(r"\s*(and)?\s*extra == ['\"][^'\"]+['\"]", "", line).rstrip("; ") for line in [*plain, *added]]


def find_missing(lines: list[str], have: dict[str, str]) -> list[str]:
    """The requirement lines that are for this machine and not satisfied by these versions."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # pip carries its own
        from pip._vendor.packaging.requirements import Requirement
    missing = []
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = have.get(canonical(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(line)
    return missing


def write_pins(have: dict[str, str], path: Path) -> Path:
    """A constraints file that holds every package at its version."""
    exact = re.compile(r"[0-9][A-Za-z0-9.!+_-]*")
    path.write_text("".join(f"{n}=={v}\n" for n, v in sorted(have.items()) if exact.fullmatch(v)), encoding="utf-8")
    return path


def _run_pip(missing: list[str], have: dict[str, str], source: str | None) -> None:
    beside = Path(source).resolve().parent if source and Path(source).is_file() else None
    with tempfile.TemporaryDirectory(prefix="f5kit-install-") as folder:
        pins = write_pins(have, Path(folder) / "keep.txt")
        options = ["-c", str(pins), *(["--find-links", str(beside)] if beside else [])]
        done = _pip(*options, *missing)
        if done.returncode and _is_conflict(done.stderr) and (exact := _choose_alone(options, missing, have)):
            done = _pip(*options, "--no-deps", *exact)
    if done.returncode:
        raise UserError(explain(done.stderr + done.stdout, missing, beside))


def _pip(*arguments: str) -> subprocess.CompletedProcess:
    # uv and pip also read constraints from the environment: what a host put there holds as well
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "2"]
    quietly = {**os.environ, "PIP_NO_INPUT": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=quietly)


def _is_conflict(said: str) -> bool:
    return "ResolutionImpossible" in said or "conflicting dependencies" in said


def _choose_alone(options: list[str], missing: list[str], have: dict[str, str]) -> list[str]:
    """name==version of all that lacks, whatever the host's own packages ask of one another; empty where it can't be.

    Packages of a host often contradict each other (its torch asks for newer setuptools than it has), and pip refuses
    then. Only what the new packages ask for counts here; of one that is too new for the host, an older one is taken.
    """
    chosen: dict[str, str] = {}
    wanted, older = missing, []
    for _ in range(60):
        if not wanted:
            return [f"{name}=={version}" for name, version in chosen.items()]
        done = _pip(*options, "--dry-run", "--no-deps", "--report", "-", *wanted, *older)
        if done.returncode:
            break
        found = {canonical(item["metadata"]["name"]): item["metadata"] for item in json.loads(done.stdout)["install"]}
        known = have | chosen | {name: about["version"] for name, about in found.items()}
        needs = {name: find_missing(about.get("requires_dist", []), known) for name, about in found.items()}
        clashing = [n for n, lines in needs.items() if any(_name(line) in known for line in lines)]
        if clashing:
            older += [f"{name}<{found[name]['version']}" for name in clashing]
            continue
        chosen |= {name: about["version"] for name, about in found.items()}
        wanted, older = sorted({line for lines in needs.values() for line in lines}), []
    return []


def _name(requirement: str) -> str:
    return canonical(re.split(r"[^A-Za-z0-9._-]", requirement)[0])


def explain(said: str, missing: list[str], beside: Path | None) -> str:
    """What pip's words mean for the reader, in a sentence."""
    names = ", ".join(re.split(r"[<>=!~;\[ ]", line)[0] for line in missing)
    if _is_conflict(said):
        found = re.search(r"Cannot install (.+?) because", said)
        what = f" ({found[1][:120]})" if found else ""
        return f"{names} cannot be installed beside what this host has{what}: choose an older runtime of the host"
    if any(mark in said for mark in _NO_NETWORK):
        where = f", and {beside} has no wheels of them" if beside else ""
        return (
            f"{names} could not be fetched{where}: switch the internet on (Kaggle: Settings > Internet), or add "
            "a folder that holds the wheels of f5kit and of what it needs"
        )
    if "No space left" in said:
        return f"the disk is full, and {names} need room: remove what is not needed"
    last = [line.strip() for line in said.splitlines() if line.strip().startswith("ERROR")]
    reason = (last or [said.strip()[-200:] or "it said nothing"])[-1][:300]
    return f"pip did not install {names} ({reason}): run this again"


def verify_imports() -> None:
    """Import what f5kit stands on in another process. Raises UserError with what fails there."""
    code = f"from f5kit.audio import import_torchaudio; import_torchaudio(); {_IMPORTS}"
    package = str(Path(__file__).resolve().parents[1])
    places = [package, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        raise UserError(f"the packages are installed and do not work together here ({last}): take a fresh runtime")
