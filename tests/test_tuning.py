"""Speed: the precision of described machines, the environment's switches, and that casting keeps the sound."""

import pytest
import torch

from f5kit.checkpoint import load_model
from f5kit.errors import UserError
from f5kit.inference import Voice
from f5kit.trial import _noise
from f5kit.tuning import LARGE, apply_environment, compile_blocks, in_buckets, speaking_precision

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("ENABLE_TORCH_COMPILE", "ENABLE_CUDNN_BENCHMARK", "TORCH_MATMUL_PRECISION")


@pytest.mark.parametrize(
    ("device", "about", "precision"),
    [
        ("cuda", (9, 0), "bf16"), ("cuda", (8, 0), "bf16"), ("cuda", (7, 5), "fp16"), ("cuda", (7, 0), "fp16"),
        ("cuda", (6, 0), "fp16"), ("cuda", (6, 1), "fp32"), ("cuda", (5, 2), "fp32"), ("mps", None, "fp32"),
        ("cpu", {"amx_bf16", "avx2"}, "bf16"), ("cpu", {"avx512_bf16"}, "bf16"), ("cpu", {"avx2"}, "fp32"),
    ],
)  # fmt: skip
def test_precision_of_described_machines(device, about, precision):
    how = {"capability": about} if device == "cuda" else {"cpu_flags": frozenset(about or ())}
    decision = speaking_precision(LARGE, device, **how)
    assert decision.value == precision and decision.reason


def test_small_models_stay_exact_on_a_cpu():
    assert speaking_precision(6_000_000, "cpu", cpu_flags=frozenset({"amx_bf16"})).value == "fp32"


@pytest.fixture
def environment(monkeypatch):
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    torch.backends.cudnn.benchmark = before[0]
    torch.set_float32_matmul_precision(before[1])


def test_the_environment_switches(environment):
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    assert apply_environment("cpu") == dict.fromkeys(NAMES[:2]) | {NAMES[2]: ""}
    assert (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == before
    environment.setenv("ENABLE_CUDNN_BENCHMARK", "true")
    environment.setenv("TORCH_MATMUL_PRECISION", "high")
    environment.setenv("ENABLE_TORCH_COMPILE", "False")
    assert apply_environment("cpu")["ENABLE_TORCH_COMPILE"] is False
    assert torch.backends.cudnn.benchmark and torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("name", NAMES)
def test_values_that_nobody_knows(environment, name):
    environment.setenv(name, "yes please")
    with pytest.raises(UserError, match=f"{name} is 'yes please'; set it to"):
        Voice.load("tiny", vocoder="griffin-lim", device="cpu")


def test_cast_weights_say_the_same_within_their_precision(awake):
    voice = Voice.load("tiny", vocoder="griffin-lim", device="cpu")
    voice.model = awake(voice.model)
    exact = voice.speak("Hello there.", steps=4, progress=False).mel
    voice.precision = "bf16"
    assert voice.cast() is voice and voice.model.transformer.proj_out.weight.dtype == torch.bfloat16
    cast = voice.speak("Hello there.", steps=4, progress=False).mel
    change = (cast - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < change < 0.1


def test_compiled_blocks_learn_the_same(awake):
    """Batches of any shape are served by code that is made once for all blocks, and by another once for one clip."""
    plain, compiled = (awake(load_model("tiny")).train() for _ in range(2))
    compile_blocks(compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for items, frames in ((2, 90), (3, 130), (5, 41)):
        batch, draws = _noise(plain.config, items, frames, 20, step=items)
        losses = [model(batch, draws) for model in (plain, compiled)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for loss in losses:
            loss.backward()
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * a.grad.abs().max().item(), msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_lengths_in_buckets_give_the_same(awake):
    """What compiled code sees is padded to 64 frames."""
    plain, padded = awake(load_model("tiny")), awake(load_model("tiny"))
    seen = []
    forward = padded.transformer.forward

    def watched(x, *others):
        seen.append(x.shape[1])
        return forward(x, *others)

    padded.transformer.forward = in_buckets(watched)
    mel = torch.randn(1, 70, 100, generator=torch.Generator().manual_seed(0))
    tokens = [plain.tokenizer.encode("Some words to be said.")]
    a, b = ([*m.sample(mel, tokens, [131], steps=2)][-1] for m in (plain, padded))
    assert torch.allclose(a, b, atol=1e-4) and set(seen) == {192}
    assert list(padded.state_dict()) == list(plain.state_dict())
