"""f5kit.preflight: other people's machines described, and what the report says of each."""

from __future__ import annotations

import pytest

from f5kit.host import GIB, GPU, TorchFacts
from f5kit.preflight import described_voice, preflight

KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
T4 = GPU("Tesla T4", (7, 5), KERNELS, int(14.74 * GIB))
A100 = GPU("NVIDIA A100-SXM4-40GB", (8, 0), KERNELS, int(39.6 * GIB))
P100 = GPU("Tesla P100-PCIE-16GB", (6, 0), KERNELS, int(15.9 * GIB))
CANARY = "hf_" + "preflightCanary" * 2


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def look(gpu: GPU | None = None, mps_bytes: int | None = None, **options):
    return preflight(probe=lambda: TorchFacts("2.13.0", gpu, mps_bytes), **options)


def row(report, name: str) -> tuple[str, str, str]:
    (found,) = [row for row in report.rows if row[0] == name]
    return found


def test_a_t4_and_its_false_bf16(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    seen = look(T4)
    assert seen["device"] == "Tesla T4" and seen["capability"] == "7.5 (sm_75)" and seen["precision"] == "fp16"
    assert "emulated" in row(seen, "bf16")[2] and "sm_90" in seen["torch is built for"]
    assert "free Colab" in seen["quota"] and "Drive" in seen["quota"]
    assert "minutes" in seen["finetuning"] or "hours" in seen["finetuning"]
    assert "updates" in row(seen, "finetuning")[2] and "not measured" in row(seen, "expected speed")[2]


def test_a_p100_without_kernels_is_recognised(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    seen = look(P100)
    assert seen.host.device == "cpu" and "no sm_60 kernels for the Tesla P100" in row(seen, "device")[2]
    assert "cannot be used" in row(seen, "capability")[2] and "GPU T4 x2" in row(seen, "device")[2]
    assert "30 GPU hours" in seen["quota"] and "Save & Run All" in seen["files last"]


def test_an_a100_has_the_real_bf16():
    seen = look(A100)
    assert seen["precision"] == "bf16" and not [name for name, _, _ in seen.rows if name == "bf16"]
    assert "fits" in seen["finetuning"] and "NOT" not in seen["finetuning"]


@pytest.mark.parametrize(("facts", "said"), [({}, "a CPU is enough to hear"), ({"mps_bytes": 16 * GIB}, "is a guess")])
def test_machines_without_cuda_get_an_honest_word(facts, said):
    assert said in look(**facts)["mind"]


def test_a_t4_is_slower_than_an_a100_and_a_cpu_slower_still():
    speeds = [float(look(gpu)["expected speed"].split()[0].replace(",", "")) for gpu in (A100, T4, None)]
    assert speeds == sorted(speeds, reverse=True)


def test_secrets_are_found_and_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    seen = look(T4)
    assert (seen["HF_TOKEN"], seen["WANDB_API_KEY"]) == ("found", "not set")
    assert CANARY not in str(seen) + seen._repr_html_() + repr(seen)


def test_the_workspaces_own_disk_counts(tmp_path):
    assert look(T4, workspace=tmp_path / "not" / "there")["free disk"].endswith("GB")
    assert "<table>" in look(T4)._repr_html_()


def test_an_unknown_model_is_told_and_stops_nothing():
    assert look(T4, model="F7TTS")["finetuning"] == "not estimated"


def test_the_described_voice_has_its_minutes():
    voice = described_voice(10)
    assert voice.seconds == pytest.approx(600) and len(voice.heldout) == 1
