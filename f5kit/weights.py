"""Reading and writing tensor files: the only place that does. safetensors throughout; a pickle is converted first.

Published layouts and their legacy fixes are named functions here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from f5kit.errors import UserError

# Where upstream publishes each preset on the Hub: repository, weights, vocabulary.
PUBLISHED = {
    "F5TTS_v1_Base": ("SWivid/F5-TTS", "F5TTS_v1_Base/model_1250000.safetensors", "F5TTS_v1_Base/vocab.txt"),
    "F5TTS_Base": ("SWivid/F5-TTS", "F5TTS_Base/model_1200000.safetensors", "F5TTS_Base/vocab.txt"),
    "E2TTS_Base": ("SWivid/E2-TTS", "E2TTS_Base/model_1200000.safetensors", "E2TTS_Base/vocab.txt"),
}

PICKLES = (".pt", ".bin", ".pth", ".ckpt")

_PATIENCE = 300.0  # seconds for converting a small pickle, on a machine that may be busy
_HUB_PATIENCE = 3.0  # seconds to wait for the Hub's first answer


def write_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file and flush it to the disk. Raises OSError when the disk does not take it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(path), metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # its way to tell of a full or failing disk
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    sync(path)


def read_tensors(path: str | Path, device: str = "cpu") -> dict[str, Tensor]:
    """Every tensor of a safetensors file. Raises UserError that names a missing or damaged file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    refuse_pickle(path)
    if not path.is_file():
        raise UserError(f"there is no weights file {path}")
    try:
        return load_file(str(path), device=device)
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}): copy or download it again") from None


def refuse_pickle(path: str | Path) -> None:
    """Raise UserError, with the way to convert it, for a file whose name says that it is a pickle."""
    if Path(path).suffix in PICKLES:
        raise UserError(
            f"{path} is a pickle, which can run code when read: convert it first, "
            f"python -m f5kit.convert {path} OUT --to f5kit"
        )


class TensorFile:
    """A safetensors file read tensor by tensor, without loading the rest of it."""

    def __init__(self, path: str | Path):
        from safetensors import SafetensorError, safe_open

        refuse_pickle(path)
        try:
            self._file = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is not a whole safetensors file ({error}): copy or download it again") from None

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, from the header alone."""
        return {key: tuple(self._file.get_slice(key).get_shape()) for key in self._file.keys()}

    @property
    def metadata(self) -> dict[str, str]:
        """What was written beside the tensors; empty when nothing was."""
        return self._file.metadata() or {}

    def __getitem__(self, key: str) -> Tensor:
        return self._file.get_tensor(key)


def write_json(path: str | Path, value) -> None:
    """Write JSON under a temporary name, flush it, and rename it: a reader sees the old file or the new one."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def sync(path: str | Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: str | Path) -> str:
    """sha256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class WithoutWeights(TorchFunctionMode):
    """In this context modules are made with weights that nobody fills, for those that are loaded in their place.

    Memory that is never written costs nothing, and no random number is drawn. (On torch's device meta it would be the
    same, but there the smallest operation imports its compiler, which takes two seconds.)
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_):  # trunc_normal_ draws until it fits
            return args[0].zero_()
        return func(*args, **kwargs)


def from_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Upstream's published layout to the model's own names (`transformer.*`).

    A published file holds `ema_model.*` with the counters `initted` and `step`; files of early 2024 also carry the mel
    filterbank and window, which are constants (F5-TTS, infer/utils_infer.py, load_checkpoint).
    """
    names = {k.removeprefix("ema_model."): v for k, v in tensors.items()}
    return {k: v for k, v in names.items() if k not in ("initted", "step") and not k.startswith("mel_spec.")}


def to_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's own names (`transformer.*`) to upstream's published layout, fp32.

    Upstream's Trainer loads such a file into its EMA, strictly, and into the model it trains. `step` 0 makes its EMA
    start afresh: a published step of a million would hold the average at its old weights (F5-TTS, model/trainer.py).
    """
    counters = {"initted": torch.tensor(True), "step": torch.tensor(0)}
    return {f"ema_model.{name}": tensor.float() for name, tensor in tensors.items()} | counters


def download_published(name: str, what: str) -> Path:
    """The "weights" or the "vocabulary" of a published preset, from the Hub or its local cache.

    Raises UserError when the preset has no published weights or the Hub can't be reached.
    """
    if name not in PUBLISHED:
        raise UserError(f"no weights are published for {name}; published are {', '.join(PUBLISHED)}")
    repository, weights, vocabulary = PUBLISHED[name]
    return download(repository, weights if what == "weights" else vocabulary)


def download(repository: str, filename: str) -> Path:
    """One file of a Hub repository, from the local cache when it is there. Raises UserError when it can't be had."""
    from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, filename)
    if isinstance(cached, str):
        return Path(cached)
    try:
        # Asked first and briefly: without a network the download itself would retry for half a minute.
        get_session().head(constants.ENDPOINT, timeout=_HUB_PATIENCE)
        return Path(hf_hub_download(repository, filename))
    except Exception as error:  # the library's errors, and those of the HTTP client beneath it, which changes
        raise UserError(
            f"{filename} of {repository} is not in the local cache and the Hub did not give it "
            f"({type(error).__name__}): check the connection, or name a local folder that holds the weights"
        ) from None


# Runs in a process of its own: arguments are the pickle, the file to write, and "ema" or "raw".
_CONVERT = """
import os, sys, torch, zipfile
from safetensors.torch import save_file

source, target, weights = sys.argv[1:]
records = None
if zipfile.is_zipfile(source):
    with zipfile.ZipFile(source) as archive:
        records = {member.file_size for member in archive.infolist()}
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            sys.exit("its records are compressed, which torch never does")
found = torch.load(source, map_location="cpu", weights_only=True)
if not isinstance(found, dict):
    sys.exit(f"it holds a {type(found).__name__} and no tensors by name")
groups = {"ema": ("ema_model_state_dict",), "raw": ("model_state_dict",)}
other = groups["raw" if weights == "ema" else "ema"][0]
for key in (*groups[weights], "state_dict", "generator", "model_state"):
    if isinstance(found.get(key), dict):
        found = found[key]
        break
else:
    if isinstance(found.get(other), dict):
        sys.exit(f"it has no {weights} weights, only {other}")
tensors = {k: v for k, v in found.items() if isinstance(k, str) and torch.is_tensor(v)}
if not tensors:
    sys.exit("it holds no tensors by name")
room = 4 * os.path.getsize(source) + (1 << 20)
for name, tensor in tensors.items():
    if tensor.layout != torch.strided or tensor.is_quantized:
        sys.exit(f"{name[:60]} is {tensor.layout}, and weights are plain")
    need, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    room -= need
    if need > held or room < 0 or (records and held and held not in records):
        sys.exit(f"{name[:60]} claims more numbers than the file holds")
save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, target)
"""


def convert_pickle(path: str | Path, weights: str = "ema") -> Path:
    """Convert a `.pt` or `.bin` of tensors to safetensors, and return the new file, kept in the user's cache.

    `weights` says which of a training checkpoint's two sets is taken: "ema" (`ema_model_state_dict`) or "raw"
    (`model_state_dict`); files with one set give it for "ema", and for "raw" where it isn't named as an average.

    The file is opened in a process of its own with torch's weights-only unpickler. torch below 2.10 is refused: its
    unpickler could be made to run code (CVE-2025-32434, CVE-2026-24747). There is no fallback. Tensors that claim
    more numbers than the file holds, and files that keep the process busy, are refused as well: UserError.
    """
    path = Path(path).resolve()
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 10):
        raise UserError(
            f"converting {path.name} needs torch 2.10 or newer to be safe, and this is {torch.__version__}: "
            "update torch, or convert the file elsewhere"
        )
    if not path.is_file():
        raise UserError(f"there is no weights file {path}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")).resolve() / "f5kit" / "converted"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{path.stem}-{weights}-{file_hash(path)[:16]}.safetensors"
    if target.is_file():
        return target
    partial = target.with_suffix(f".partial-{os.getpid()}")
    command = [sys.executable, "-c", _CONVERT, str(path), str(partial), weights]
    patience = _PATIENCE + path.stat().st_size / 2e7
    try:
        # Started in the cache folder: Python imports from where it starts, and a folder of downloads is no such place.
        done = subprocess.run(command, capture_output=True, text=True, cwd=cache, timeout=patience)
    except subprocess.TimeoutExpired:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} kept its reader busy for {patience:.0f} s: it is damaged or malicious") from None
    if done.returncode:
        partial.unlink(missing_ok=True)
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"{path} could not be converted to safetensors ({reason[:200]}): it is damaged or holds more than tensors"
        )
    os.replace(partial, target)
    return target
