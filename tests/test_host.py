"""f5kit.host: other people's machines, described by the few facts that are asked of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from f5kit import host
from f5kit.errors import UserError
from f5kit.host import GIB, GPU, Decision, TorchFacts, detect_host, secret, workspace_root

KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
T4 = GPU("Tesla T4", (7, 5), KERNELS, int(14.74 * GIB))
A100 = GPU("NVIDIA A100-SXM4-40GB", (8, 0), KERNELS, int(39.6 * GIB))
P100 = GPU("Tesla P100-PCIE-16GB", (6, 0), KERNELS, int(15.9 * GIB))
CANARY = "hf_canaryThatMustNotBeSeen"


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)


def machine(gpu: GPU | None = None, mps_bytes: int | None = None, version: str | None = "2.13.0"):
    return lambda: TorchFacts(version, gpu, mps_bytes)


def test_decision_reads_as_a_sentence():
    assert str(Decision("fp16", "sm_75 has no native bf16")) == "fp16: sm_75 has no native bf16"


def test_t4_is_fp16_although_torch_would_claim_bf16():
    seen = detect_host(probe=machine(T4))
    assert (seen.device, seen.precision.value) == ("cuda", "fp16")
    assert str(seen) == "Tesla T4, 14.7 GB, fp16: sm_75 has no native bf16"


def test_a100_is_bf16():
    seen = detect_host(probe=machine(A100))
    assert (seen.device, seen.precision) == ("cuda", Decision("bf16", "sm_80 computes bf16 natively"))


def test_p100_without_kernels_falls_to_the_cpu_and_names_the_way_out(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    seen = detect_host(probe=machine(P100))
    assert (seen.platform, seen.device, seen.precision.value) == ("kaggle", "cpu", "fp32")
    assert "no sm_60 kernels for the Tesla P100-PCIE-16GB" in seen.device_reason
    assert "GPU T4 x2" in str(seen)
    with pytest.raises(UserError, match="no sm_60 kernels.*T4 x2"):
        detect_host("cuda", probe=machine(P100))


def test_p100_with_kernels_trains_in_fp32():
    old = GPU(P100.name, P100.capability, ("sm_60", "sm_70"), P100.memory_bytes)
    assert detect_host(probe=machine(old)).precision.value == "fp32"


@pytest.mark.parametrize(
    ("capability", "archs", "works"),
    [
        ((8, 9), ("sm_80",), True),  # machine code runs on later minors of its major
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90",), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # PTX is compiled for later GPUs
        ((7, 5), ("compute_90",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100a", "compute_100a"), False),  # the letter a: this GPU and no other
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("compute_100f",), False),
        ((9, 4), ("gfx90a", "gfx942"), True),  # another vendor's build
    ],
)
def test_kernels(capability, archs, works):
    assert host._has_kernels(GPU("a GPU", capability, archs, GIB)) is works


def test_cpu_says_why_and_how_to_get_a_gpu(monkeypatch):
    seen = detect_host(probe=machine())
    assert (seen.device, seen.precision.value) == ("cpu", "fp32")
    assert "exact and portable; bf16 can be asked for" in str(seen)
    assert "torch 2.13.0 sees no CUDA GPU" in str(seen)
    assert seen.memory_gb == seen.ram_gb > 0
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert "Change runtime type" in str(detect_host(probe=machine()))


def test_mps():
    seen = detect_host(probe=machine(mps_bytes=12 * GIB))
    assert (seen.device, seen.precision.value, seen.memory_gb) == ("mps", "fp32", 12)
    assert str(seen).endswith("half precision on Metal is not tested in this kit")


def test_a_device_asked_for_is_taken_or_refused():
    assert detect_host("cpu", probe=machine(A100)).device == "cpu"
    with pytest.raises(UserError, match="'mps' cannot be used: torch sees no Metal GPU"):
        detect_host("mps", probe=machine(A100))
    with pytest.raises(UserError, match="device is 'tpu'; choose one of cuda, mps, cpu"):
        detect_host("tpu", probe=machine())


def test_without_torch():
    seen = detect_host(probe=machine(version=None))
    assert seen.torch is None and "torch is not installed" in str(seen)


def test_this_machine():
    torch = pytest.importorskip("torch")
    seen = detect_host()
    assert seen.torch == torch.__version__
    assert seen.cores >= 1 and seen.ram_gb > 0 and seen.disk_free_gb > 0
    assert seen.device in host.DEVICES


def test_table_is_escaped():
    page = detect_host(probe=machine(GPU("<T4 & co>", (7, 5), KERNELS, GIB)))._repr_html_()
    assert "<th>memory (GB)</th><td>1.0</td>" in page
    assert "&lt;T4 &amp; co&gt;" in page and "<T4" not in page


def test_import_loads_no_torch():
    check = "import sys, f5kit.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


# ---- memory, cores, folders


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_ram_respects_container_limits(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\n")
    assert host._ram_bytes(tmp_path) == 16 * 2**20
    write(tmp_path / "proc/self/cgroup", "0::/kits/one\n")
    write(tmp_path / "sys/fs/cgroup/kits/one/memory.max", "max\n")
    assert host._ram_bytes(tmp_path) == 16 * 2**20
    write(tmp_path / "sys/fs/cgroup/kits/memory.max", f"{6 * 2**20}\n")  # the group around ours binds us too
    assert host._ram_bytes(tmp_path) == 6 * 2**20
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * 2**20}\n")  # version 1
    assert host._ram_bytes(tmp_path) == 4 * 2**20


def test_cores_respect_affinity_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert host._cores(tmp_path) == 8
    write(tmp_path / "sys/fs/cgroup/cpu.max", "max 100000")
    assert host._cores(tmp_path) == 8
    write(tmp_path / "sys/fs/cgroup/cpu.max", "150000 100000")
    assert host._cores(tmp_path) == 2


def test_workspace_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert workspace_root() == tmp_path
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert workspace_root() == Path("/content")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert workspace_root() == Path("/kaggle/working")


# ---- secrets


def stores(monkeypatch, kaggle=None, colab=None):
    """Put fake secret stores in place: functions from a name to a value."""
    if kaggle:
        client = type("UserSecretsClient", (), {"get_secret": lambda self, name: kaggle(name)})
        monkeypatch.setitem(sys.modules, "kaggle_secrets", types.SimpleNamespace(UserSecretsClient=client))
    if colab:
        module = types.ModuleType("google.colab")
        module.userdata = types.SimpleNamespace(get=colab)
        monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
        monkeypatch.setitem(sys.modules, "google.colab", module)


def fails(name):
    raise TimeoutError(f"no page answered; the value was {CANARY}")


def test_secret_order(monkeypatch):
    monkeypatch.delenv("A_TOKEN", raising=False)
    assert secret("A_TOKEN") is None
    stores(monkeypatch, colab=lambda name: "colab's " + name)
    assert secret("A_TOKEN") == "colab's A_TOKEN"
    stores(monkeypatch, kaggle=lambda name: "kaggle's " + name)
    assert secret("A_TOKEN") == "kaggle's A_TOKEN"
    monkeypatch.setenv("A_TOKEN", " from the environment\n")
    assert secret("A_TOKEN") == "from the environment"


@pytest.mark.parametrize("answer", [fails, lambda name: None, lambda name: "", lambda name: 7])
def test_a_store_that_fails_has_no_secret(monkeypatch, capfd, answer):
    monkeypatch.setenv("A_TOKEN", "")
    stores(monkeypatch, kaggle=answer, colab=answer)
    assert secret("A_TOKEN") is None
    assert capfd.readouterr() == ("", "")


def test_on_kaggle_colab_is_not_asked(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    stores(monkeypatch, kaggle=fails, colab=lambda name: pytest.fail("Colab was asked"))
    assert secret("A_TOKEN") is None


def test_a_secret_is_neither_shown_nor_kept(monkeypatch, capfd):
    monkeypatch.setenv("A_TOKEN", CANARY)
    assert secret("A_TOKEN") == CANARY
    seen = detect_host(probe=machine(T4))
    assert CANARY not in "".join([repr(seen), str(seen), seen._repr_html_(), *map(repr, vars(host).values())])
    assert CANARY not in "".join(capfd.readouterr())
