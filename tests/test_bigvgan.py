"""BigVGAN's world: its mel, against librosa where the package that needs it is there, and its vocoder."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from f5kit.audio import frame_count, log_mel, mel_filterbank, read_audio
from f5kit.cfm import CFM
from f5kit.checkpoint import export_model
from f5kit.config import PRESETS, MelConfig
from f5kit.errors import UserError
from f5kit.evaluate import dataset_loss
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.text import Tokenizer, english_vocab
from f5kit.trainer import Trainer
from f5kit.vocoder import BIGVGAN_REPOSITORY, BigVGANVocoder, GriffinLim, load_vocoder
from f5kit.weights import write_tensors

MEL = MelConfig("bigvgan")
TINY = dict(
    num_mels=100, sampling_rate=24_000, n_fft=1024, hop_size=256, win_size=1024, fmin=0, fmax=None,
    upsample_rates=[4, 4, 4, 4], upsample_kernel_sizes=[8, 8, 8, 8], upsample_initial_channel=32, resblock="1",
    resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], activation="snakebeta", snake_logscale=True,
    use_bias_at_final=False, use_tanh_at_final=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def clip(recordings):
    """One and a half seconds of a recording, (nw,)."""
    return read_audio(sorted((recordings / "wavs").iterdir())[0])[4_000:40_000]


# ---- the mel


def test_the_filters_have_one_area_and_stand_on_slaneys_scale():
    bank = mel_filterbank(MEL)
    assert bank.shape == (513, 100) and bank.dtype == torch.float32 and (bank >= 0).all()
    # Below 1 kHz the scale is linear, 200 Hz for 3 mels, so the filters there are equally wide and high, and beyond it
    # each is wider by a constant factor, and lower by it.
    top = 15 + torch.log(torch.tensor(12.0)).item() / (torch.log(torch.tensor(6.4)).item() / 27)
    width = top / 101 * 200 / 3
    assert bank[:, 5].max() == pytest.approx(1 / width, rel=0.3)
    areas = bank.sum(0)[40:] * 24_000 / 1024  # those below are too narrow for the sum over bins to be an integral
    assert areas.min() > 0.95 and areas.max() < 1.05


def test_the_filters_equal_librosas_to_the_bit():
    filters = pytest.importorskip("librosa").filters
    for rate, n_fft, n_mels in ((24_000, 1024, 100), (22_050, 1024, 80), (44_100, 2048, 128)):
        expected = torch.from_numpy(filters.mel(sr=rate, n_fft=n_fft, n_mels=n_mels)).T
        assert torch.equal(mel_filterbank(MelConfig("bigvgan", rate, n_fft, n_mels=n_mels)), expected)


@pytest.mark.parametrize("samples", [513, 767, 768, 1024, 24_000])
@pytest.mark.parametrize("kind", ["vocos", "bigvgan"])
def test_one_function_knows_how_many_frames(samples, kind):
    mel = MelConfig(kind)
    assert len(log_mel(torch.zeros(samples), mel)) == frame_count(samples, mel)
    assert frame_count(samples, mel) == samples // 256 + (kind == "vocos")


def test_a_tone_has_the_level_and_the_bin_it_should():
    tone = 0.5 * torch.sin(2 * torch.pi * 500 * torch.arange(24_000) / 24_000)
    mel = log_mel(tone, MEL)[10:-10].mean(0)
    bank = mel_filterbank(MEL)
    # A sine of amplitude a under a Hann window has a magnitude of a n / 4 at its bin, and half of it in the next two.
    spectrum = torch.stft(tone, 1024, 256, 1024, torch.hann_window(1024), return_complex=True).abs().mean(-1)
    assert mel.argmax() == (spectrum @ bank).argmax()
    assert mel.max().item() == pytest.approx((spectrum @ bank).max().log().item(), abs=0.05)
    assert torch.equal(log_mel(torch.zeros(2_000), MEL), log_mel(torch.zeros(2, 2_000), MEL)[1])


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="MelConfig.kind is 'mp3'; choose one of vocos, bigvgan"):
        MelConfig("mp3")


def test_a_dataset_gives_a_model_the_mels_it_was_trained_on(dataset, tmp_path):
    config = PRESETS["F5TTS_Base"].replace(
        name="b", dim=32, depth=1, heads=1, dim_head=32, text_dim=16, conv_layers=1, vocab_size=95, mel=MEL
    )
    other = dataset.with_mel(MEL)
    assert dataset.with_mel(dataset.mel_config) is dataset
    for ours, theirs in zip(other.clips, dataset.clips, strict=True):
        assert ours.frames == theirs.frames - 1 == len(other.mel(ours))
        assert len(dataset.mel(theirs)) == theirs.frames
    expected = log_mel(read_audio(other.path(other.clips[0])), MEL)
    assert torch.equal(other.mel(other.clips[0]), expected.half().float())
    with pytest.raises(UserError, match="prepare it for that mel"):
        dataset.with_mel(MelConfig("bigvgan", hop_length=128))
    export_model(CFM(config, Tokenizer(english_vocab())), tmp_path / "m", torch.float32)
    plan = plan_run(str(tmp_path / "m"), dataset, detect_host("cpu"), updates=1, update_frames=600)
    trainer = Trainer(plan, dataset, tmp_path / "run")
    trainer.fit()
    assert trainer.dataset.mel_config == MEL
    assert dataset_loss(trainer.model, dataset) == dataset_loss(trainer.model, other)


# ---- Griffin-Lim of this mel


def test_copy_synthesis_of_both_kinds_stays_in_time(clip):
    for mel in (MelConfig(), MEL):
        expected = log_mel(clip, mel)
        audio = GriffinLim(mel).decode(expected)
        assert len(audio) == (len(expected) - (mel.kind == "vocos")) * 256
        copy = log_mel(audio, mel)
        shifted = {k: (copy[5 + k : k - 10] - expected[5:-10]).abs().mean().item() for k in (-1, 0, 1)}
        print(mel.kind, shifted)
        assert shifted[0] < 0.25 and shifted[0] < min(shifted[-1], shifted[1]) / 1.5


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_few_frames(n):
    assert GriffinLim(MEL).decode(torch.full((n, 100), -6.0)).shape == (n * 256,)


def test_auto_offline_is_griffin_lim_and_says_why(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    vocoder = load_vocoder("auto", MEL)
    assert vocoder.name == "griffin-lim" and "rougher in sound than BigVGAN" in vocoder.why
    with pytest.raises(UserError, match=f"config.json of {BIGVGAN_REPOSITORY} is not in the local cache"):
        load_vocoder("bigvgan")


# ---- the generator


def folder_of(tmp_path, config, tensors=None):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", tensors or {"a": torch.zeros(1)})
    return tmp_path


@pytest.mark.parametrize(
    ("mel", "changes", "sentence"),
    [
        (MEL, {"sampling_rate": 22_050}, "sampling_rate 22050 and the model's mel 24000"),
        (MEL, {"num_mels": 80}, "num_mels 80 and the model's mel 100"),
        (MEL, {"fmax": 8_000}, "fmax is 8000"),
        (MEL, {"upsample_rates": None}, None),
        (MelConfig(), {}, "head is None|feature_extractor is None|backbone is None"),
    ],
)
def test_a_vocoder_of_another_mel_is_refused(tmp_path, mel, changes, sentence):
    config = {k: v for k, v in {**TINY, **changes}.items() if k != "upsample_rates" or v}
    sentence = sentence or "describes no BigVGAN"
    with pytest.raises(UserError, match=sentence):
        load_vocoder(folder_of(tmp_path, config), mel)
    with pytest.raises(UserError, match="its own kind, and the mel here is vocos; choose 'vocos'"):
        BigVGANVocoder(TINY, {}, MelConfig())


def test_without_the_package_the_way_to_it_is_told():
    check = (
        "import sys; sys.modules['bigvgan'] = None\n"
        "from f5kit.errors import UserError\nfrom f5kit.vocoder import _bigvgan_class\n"
        "try: _bigvgan_class()\nexcept UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert "pip install --no-deps bigvgan, and pip install librosa" in done.stdout, done.stderr


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder in the published layout with its pickle, the package's own generator of the same weights)."""
    package = pytest.importorskip("bigvgan")
    folder = tmp_path_factory.mktemp("bigvgan")
    (folder / "config.json").write_text(json.dumps(TINY))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = package.BigVGAN(package.bigvgan.AttrDict(TINY)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    torch.save({"generator": model.state_dict()}, folder / "bigvgan_generator.pt")
    return folder, model


def test_the_published_layout_equals_the_package_itself(published, clip):
    folder, model = published
    mel = log_mel(clip, MEL)
    state = torch.get_rng_state()
    ours = load_vocoder(folder)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        expected = model(mel.T[None])[0, 0]
    assert ours.name == "bigvgan" and expected.std() > 1e-4
    audio = ours.decode(mel)
    assert audio.shape == (len(mel) * 256,)
    torch.testing.assert_close(audio, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.decode(torch.stack([mel, mel]))[1], audio, atol=1e-6, rtol=1e-5)
    assert ours.decode(mel[:1]).shape == (256,)


def test_weights_saved_for_inference_load_too(published, clip, tmp_path):
    folder, _ = published
    ours = load_vocoder(folder)
    again = load_vocoder(folder_of(tmp_path / "plain", TINY, ours.generator.state_dict()), MEL)
    mel = log_mel(clip, MEL)
    assert torch.equal(again.decode(mel), ours.decode(mel))


def test_weights_and_figures_stay_what_they_are(published, tmp_path):
    import matplotlib

    folder, model = published
    matplotlib.use("svg")
    load_vocoder(folder)
    assert matplotlib.get_backend() == "svg"
    tensors = {k: v for k, v in model.state_dict().items() if k != "conv_pre.bias"}
    with pytest.raises(UserError, match="1 tensors differ, first conv_pre.bias"):
        load_vocoder(folder_of(tmp_path / "cut", TINY, tensors), MEL)
    with pytest.raises(UserError, match="bigvgan cannot build what the config describes"):
        load_vocoder(folder_of(tmp_path / "odd", {**TINY, "activation": "relu"}, tensors), MEL)
