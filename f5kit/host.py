"""The machine we run on: its device and precision, its memory, disk and cores, Colab or Kaggle, its secrets.

Whatever is decided here is returned with its reason, so that a notebook can show why this machine trains the
way it does. Memory and disk are counted in units of 2**30 bytes, as the notebook hosts count them.
"""

from __future__ import annotations

import html
import math
import os
import platform as python_platform
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from f5kit.errors import UserError

GIB = 2**30
DEVICES = ("cuda", "mps", "cpu")
_ROOTS = {"colab": Path("/content"), "kaggle": Path("/kaggle/working")}
_NO_GPU_REMEDY = {
    "colab": "for one, choose Runtime > Change runtime type > T4 GPU",
    "kaggle": "for one, choose Settings > Accelerator > GPU T4 x2",
    "local": "if there is one, its driver or a CUDA build of torch is missing",
}
_NO_KERNELS_REMEDY = {**_NO_GPU_REMEDY, "local": "install a torch build that has them"}


@dataclass(frozen=True)
class Decision:
    """A value and the one sentence that says why it was chosen."""

    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.value}: {self.reason}"


@dataclass(frozen=True)
class GPU:
    """What torch.cuda tells about its first GPU."""

    name: str
    """As the driver names it."""
    capability: tuple[int, int]
    """Major and minor: (7, 5) is sm_75."""
    arch_list: tuple[str, ...]
    """The architectures this torch build has kernels for: "sm_75", "compute_120", ..."""
    memory_bytes: int
    """All of it, used or free."""

    @property
    def sm(self) -> str:
        return "sm_{}{}".format(*self.capability)


@dataclass(frozen=True)
class TorchFacts:
    """What is asked of torch. Tests put other machines in its place."""

    version: str | None = None
    """None where torch is not installed."""
    gpu: GPU | None = None
    """None where torch.cuda is not available."""
    mps_bytes: int | None = None
    """Memory the Metal backend recommends to use at most; None where there is none."""


@dataclass(frozen=True)
class Host:
    """The machine, and what was decided for it."""

    platform: str
    """"colab", "kaggle" or "local"."""
    device: str
    """"cuda", "mps" or "cpu"."""
    device_name: str
    """The GPU's name, or the processor's."""
    memory_gb: float
    """Memory of the device; on the CPU, the RAM."""
    ram_gb: float
    """RAM this process may use, container limits included; 0 where the system does not tell."""
    disk_free_gb: float
    """Free space under `workspace_root()`."""
    cores: int
    """Processor cores this process may use."""
    precision: Decision
    """"fp32", "bf16" or "fp16" for training."""
    python: str
    """Its version."""
    torch: str | None
    """Its version; None where it is not installed."""
    device_reason: str = ""
    """Why this device."""

    def __str__(self) -> str:
        line = f"{self.device_name}, {self.memory_gb:.1f} GB, {self.precision}"
        return f"{line}; {self.device_reason}" if self.device == "cpu" else line

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        rows = []
        for item in fields(self):
            name, value = item.name.replace("_gb", " (GB)").replace("_", " "), getattr(self, item.name)
            shown = f"{value:.1f}" if isinstance(value, float) else str(value)
            rows.append(f"<tr><th>{html.escape(name)}</th><td>{html.escape(shown)}</td></tr>")
        return f"<table>{''.join(rows)}</table>"


def detect_host(device: str | None = None, *, probe: Callable[[], TorchFacts] | None = None) -> Host:
    """Look at this machine.

    device: None for the best one that works, or one of DEVICES, taken at its word.
    probe: a function that returns TorchFacts; tests use it to describe machines that are not there.
    Asking torch initialises CUDA in this process. Raises UserError for a device that cannot be used.
    """
    facts = (probe or probe_torch)()
    where = _platform()
    chosen = _choose_device(device, facts, where)
    ram = _ram_bytes()
    if chosen.value == "cuda":
        name, memory = facts.gpu.name, facts.gpu.memory_bytes
    elif chosen.value == "mps":
        name, memory = f"Apple {python_platform.machine()} GPU", facts.mps_bytes
    else:
        name, memory = _processor(), ram
    return Host(
        platform=where, device=chosen.value, device_name=name, memory_gb=memory / GIB, ram_gb=ram / GIB,
        disk_free_gb=_disk_free_bytes(workspace_root()) / GIB, cores=_cores(),
        precision=_precision(chosen.value, facts), python=python_platform.python_version(),
        torch=facts.version, device_reason=chosen.reason,
    )  # fmt: skip


def secret(name: str) -> str | None:
    """The secret of that name: from the environment, else Kaggle's store, else Colab's, else None.

    Never prints or raises: a secret that cannot be had is None, and the caller says what it will not do then.
    """
    value = os.environ.get(name) or _kaggle_secret(name) or _colab_secret(name)
    return value.strip() or None if isinstance(value, str) else None


def workspace_root() -> Path:
    """Where notebooks keep folders: /content on Colab, /kaggle/working on Kaggle, else the current one."""
    return _ROOTS.get(_platform()) or Path.cwd()


# ---- the device and its precision


def probe_torch() -> TorchFacts:
    """What torch tells about this machine. Initialises CUDA in this process."""
    try:
        import torch
    except ModuleNotFoundError:
        return TorchFacts()
    gpu, mps_bytes = None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPUs without kernels: `_choose_device` says that
        if torch.cuda.is_available():
            facts = torch.cuda.get_device_properties(0)
            archs = tuple(torch.cuda.get_arch_list())
            gpu = GPU(facts.name, (facts.major, facts.minor), archs, facts.total_memory)
        elif torch.backends.mps.is_available():
            mps_bytes = torch.mps.recommended_max_memory()
    return TorchFacts(torch.__version__, gpu, mps_bytes)


def _has_kernels(gpu: GPU) -> bool:
    """Whether the build runs on that GPU: machine code of its major and no later minor, or older PTX."""
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch) for arch in gpu.arch_list]
    known = [match.groups() for match in known if match]
    for kind, major, minor, only in known:  # the letter a: for this GPU only; f: for its family
        arch = (int(major), int(minor))
        reaches = arch[0] == gpu.capability[0] or (kind == "compute" and not only)
        if arch == gpu.capability or (reaches and only != "a" and arch <= gpu.capability):
            return True
    return not known  # other vendors' builds name architectures differently: nothing speaks against them


def _choose_device(asked: str | None, facts: TorchFacts, where: str) -> Decision:
    """The device, or a UserError when the one asked for cannot work."""
    trouble = {}
    if facts.version is None:
        trouble["cuda"] = "torch is not installed"
    elif facts.gpu is None:
        trouble["cuda"] = f"torch {facts.version} sees no CUDA GPU; {_NO_GPU_REMEDY[where]}"
    elif not _has_kernels(facts.gpu):
        lacking = f"torch {facts.version} has no {facts.gpu.sm} kernels for the {facts.gpu.name}"
        trouble["cuda"] = f"{lacking}; {_NO_KERNELS_REMEDY[where]}"
    if facts.mps_bytes is None:
        trouble["mps"] = "torch sees no Metal GPU; leave the device out"
    if asked is not None and asked not in DEVICES:
        raise UserError(f"device is {asked!r}; choose one of {', '.join(DEVICES)}, or None for the best")
    if asked in trouble:
        raise UserError(f"device {asked!r} cannot be used: {trouble[asked]}")
    if asked is not None:
        return Decision(asked, "asked for")
    if "cuda" not in trouble:
        return Decision("cuda", f"torch {facts.version} has kernels for {facts.gpu.sm}")
    if "mps" not in trouble:
        return Decision("mps", "torch sees a Metal GPU and no CUDA GPU")
    return Decision("cpu", trouble["cuda"])


def _precision(device: str, facts: TorchFacts) -> Decision:
    """What to train in. torch.cuda.is_bf16_supported() is not asked: it says yes to emulation, as on a T4."""
    if device == "cpu":
        return Decision("fp32", "exact and portable; bf16 can be asked for")
    if device == "mps":
        return Decision("fp32", "exact; half precision on Metal is not tested in this kit")
    return cuda_precision(facts.gpu.capability)


def cuda_precision(capability: tuple[int, int]) -> Decision:
    """What to train in on a CUDA device of that capability."""
    sm = "sm_{}{}".format(*capability)
    if capability >= (8, 0):
        return Decision("bf16", f"{sm} computes bf16 natively")
    if capability >= (7, 0):
        return Decision("fp16", f"{sm} has no native bf16")
    return Decision("fp32", f"{sm} has no tensor cores for half precision")


# ---- the rest of the machine; `root` is the file system to read, for tests


def _platform() -> str:
    # Kaggle first: its image is built on Colab's and may carry Colab's variables.
    if os.environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "kaggle"
    return "colab" if os.environ.get("COLAB_RELEASE_TAG") else "local"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _cgroup_values(root: Path, *names: str) -> list[str]:
    """The text of those control files in this process's control group and the groups around it."""
    base = root / "sys/fs/cgroup"
    own = re.findall(r"^\d+:(?:memory)?:/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    around = {Path(), *(folder for path in own for folder in (Path(path), *Path(path).parents))}
    folders = {top / folder for top in (base, base / "memory") for folder in around}
    return [text for folder in sorted(folders) for name in names if (text := _read(folder / name).strip())]


def _ram_bytes(root: Path = Path("/")) -> int:
    known = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if known:
        total = int(known[1]) * 1024
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return 0
    limits = _cgroup_values(root, "memory.max", "memory.limit_in_bytes")
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _cores(root: Path = Path("/")) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [text.split() for text in _cgroup_values(root, "cpu.max")]
    limits = [math.ceil(int(quota) / int(period)) for quota, period in quotas if quota != "max"]
    return max(1, min([allowed, *limits]))


def _processor(root: Path = Path("/")) -> str:
    known = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return known[1].strip() if known else python_platform.processor() or python_platform.machine() or "CPU"


def _disk_free_bytes(folder: Path) -> int:
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


# ---- secret stores; whatever goes wrong there is answered with None: the secret cannot be had


def _kaggle_secret(name: str) -> str | None:
    try:
        from kaggle_secrets import UserSecretsClient

        return UserSecretsClient().get_secret(name)
    except Exception:
        return None


def _colab_secret(name: str) -> str | None:
    if _platform() == "kaggle":  # Colab's module may be there, and would wait ten seconds for Colab's page
        return None
    try:
        from google.colab import userdata

        return userdata.get(name)
    except Exception:
        return None
