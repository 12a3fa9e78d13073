"""Checkpoints between f5kit and the f5-tts package, both ways, live: loaded, sampled from, finetuned on.

    make parity
    python tests/parity/compare_checkpoints.py --seed 7      the run that printed seed 7

For each published reading, at a small size: upstream's own loader takes a finetune that f5kit exported and samples the
same mel, and upstream's Trainer goes on finetuning from it; f5kit takes the `.pt` of that Trainer, samples the same
mel, and finetunes from it. Exits 1 when a difference is above its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import yaml
from compare import BOUND, GUIDANCE, SWAY, Table, largest, relative
from models import randomise, upstream_model

from f5kit.audio import import_torchaudio, log_mel
from f5kit.cfm import CFM
from f5kit.checkpoint import export_model, load_model, readings
from f5kit.config import PRESETS, MelConfig
from f5kit.convert import convert_model
from f5kit.data import Dataset
from f5kit.host import detect_host
from f5kit.hub import build_export
from f5kit.plan import plan_run
from f5kit.prepare import prepare_dataset
from f5kit.text import Tokenizer, english_vocab
from f5kit.trainer import Trainer

import_torchaudio()
warnings.filterwarnings("ignore", "Couldn't find ffmpeg")  # pydub, which f5_tts imports and this does not use
import f5_tts.model  # noqa: E402
from f5_tts.infer.utils_infer import load_model as upstream_load_model  # noqa: E402
from f5_tts.model.dataset import CustomDataset  # noqa: E402
from f5_tts.model.modules import MelSpec  # noqa: E402

VOCAB = english_vocab()
SMALL = dict(dim=64, depth=2, heads=2, dim_head=32, text_dim=32, conv_layers=2, vocab_size=len(VOCAB))
CASES = {
    "v1": PRESETS["F5TTS_v1_Base"].replace(name="F5TTS_v1_64x2", **SMALL),
    "v0": PRESETS["F5TTS_Base"].replace(name="F5TTS_64x2", **SMALL),
    "E2": PRESETS["E2TTS_Base"].replace(name="E2TTS_64x2", **{**SMALL, "text_dim": 100, "conv_layers": 0}),
    "v0 bigvgan": PRESETS["F5TTS_Base"].replace(name="F5TTS_64x2_bigvgan", mel=MelConfig("bigvgan"), **SMALL),
}
UPDATES = 2
TEXT = "Some call me nature, others call me mother nature."
FP32 = BOUND[torch.float32]


def fresh(case: str) -> CFM:
    """f5kit's model of a case with random weights everywhere."""
    theirs = upstream_model(CASES[case])
    randomise(theirs)
    model = CFM(CASES[case], Tokenizer(VOCAB))
    model.load_state_dict(theirs.state_dict(), strict=True)
    return model.eval()


def small_dataset(folder: Path) -> Dataset:
    """Eight short clips of the demo voice."""
    out = folder.with_name("prepared")
    voice = Path(export_model.__code__.co_filename).parent / "demo_voice"
    (folder / "wavs").mkdir(parents=True)
    clips = sorted((voice / "wavs").glob("*.flac"), key=lambda f: f.stat().st_size)[:8]
    for clip in clips:
        shutil.copy(clip, folder / "wavs")
    lines = (voice / "metadata.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.split("|")[0] in {clip.stem for clip in clips}]
    (folder / "metadata.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return prepare_dataset(folder, out, progress=False)


def finetune(model: Path, dataset: Dataset, run: Path):
    """f5kit's Trainer for two updates."""
    plan = plan_run(str(model), dataset, detect_host("cpu"), updates=UPDATES, update_frames=600)
    return Trainer(plan, dataset, run).fit()


# --- upstream's side --------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet():
    """Upstream prints and draws bars; what it says is shown only when it fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except BaseException:
        print(said.getvalue())
        raise


def load_upstream(folder: Path):
    """Upstream's own inference loader on what `convert --to upstream` wrote, by the yaml beside it."""
    config = yaml.safe_load((folder / "model.yaml").read_text(encoding="utf-8"))["model"]
    (file,) = folder.glob("*.safetensors")
    with quiet():
        return upstream_load_model(
            getattr(f5_tts.model, config["backbone"]), config["arch"], str(file), device="cpu",
            mel_spec_type=config["mel_spec"]["mel_spec_type"], vocab_file=str(folder / "vocab.txt"),
        )  # fmt: skip


def upstream_rows(dataset: Dataset) -> CustomDataset:
    """The clips as upstream's dataset of ready mels."""
    rows = [
        dict(audio_path=str(dataset.path(c)), text=list(c.text), duration=c.seconds, mel_spec=dataset.mel(c).T.tolist())
        for c in dataset.train[:4]
    ]
    return CustomDataset(rows, durations=[row["duration"] for row in rows], preprocessed_mel=True)


def upstream_trainer(model, folder: Path):
    """Upstream's Trainer as its finetuning script makes it."""
    return f5_tts.model.Trainer(
        model, 1, 1e-4, num_warmup_updates=1, save_per_updates=1000, last_per_updates=1000, checkpoint_path=str(folder),
        batch_size_per_gpu=2, batch_size_type="sample", logger=None, accelerate_kwargs=dict(cpu=True),
    )  # fmt: skip


def samples_differ(ours: CFM, theirs, mel: torch.Tensor, seed: int) -> float:
    """The largest relative difference of guided samples that continue `mel` (n d), 16 steps."""
    n, options = len(mel) + 90, dict(steps=16, cfg_strength=GUIDANCE)
    torch.manual_seed(seed)
    noise = torch.randn(1, n, mel.shape[1])
    tokens = [ours.tokenizer.encode(TEXT)]
    *_, result = ours.sample(mel[None], tokens, [n], noise=noise, sway=SWAY, **options)
    with quiet():
        out, _ = theirs.eval().sample(mel[None], [list(TEXT)], n, seed=seed, sway_sampling_coef=SWAY, **options)
    return relative(result[0, len(mel) :], out[0, len(mel) :])


def weights_differ(ours: CFM, theirs: dict) -> float:
    """The largest difference of weights; infinite when names differ."""
    own = ours.state_dict()
    if own.keys() != theirs.keys():
        return float("inf")
    return largest((own[name] - theirs[name].to(own[name].dtype)).abs().max() for name in own)


# --- the two ways -----------------------------------------------------------------------------------


def to_upstream(table: Table, case: str, dataset: Dataset, work: Path, seed: int) -> Path:
    """f5kit's finetune in upstream's hands. Returns the folder of upstream's finetune of it."""
    export_model(fresh(case), work / "base", torch.float32)
    run = finetune(work / "base", dataset, work / "run")
    exported = convert_model(run.path, work / "upstream", "upstream")
    ours, theirs = load_model(run.path), load_upstream(exported)
    table.add(case, "fp32", "f5kit to upstream: weights", weights_differ(ours, theirs.state_dict()), 0)
    reference = dataset.with_mel(ours.config.mel).mel(dataset.clips[0])
    table.add(case, "fp32", "f5kit to upstream: sample", samples_differ(ours, theirs, reference, seed), FP32)

    folder = work / "ckpts"
    folder.mkdir()
    (file,) = exported.glob("*.safetensors")
    shutil.copy(file, folder / f"pretrained_{file.name}")
    model = load_upstream(exported)
    with torch.no_grad():
        for parameter in model.parameters():  # so that what is found in it was loaded from the file
            parameter.zero_()
    with quiet():
        trainer = upstream_trainer(model, folder)
        start = trainer.load_checkpoint()
        loaded = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        trainer.train(upstream_rows(dataset.with_mel(ours.config.mel)), num_workers=1, resumable_with_seed=seed)
    saved = torch.load(folder / "model_last.pt", weights_only=True)
    table.add(case, "fp32", "upstream's Trainer: weights at start", weights_differ(ours, loaded), 0)
    off = abs(start) + abs(saved["update"] - UPDATES) + abs(saved["ema_model_state_dict"]["step"].item() - UPDATES)
    table.add(case, "-", f"upstream's Trainer: {UPDATES} updates counted", off, 0)
    moved = weights_differ(ours, saved["model_state_dict"])
    table.add(case, "-", "upstream's Trainer: weights moved", 0 if 0 < moved < 1 else float("inf"), 0)
    return folder


def published_to_upstream(table: Table, case: str, dataset: Dataset, work: Path, seed: int) -> None:
    """A published folder, as it stands, in upstream's own loader: the fp16 weights that it holds, read by both."""
    folder = build_export(work / "run", work / "published", language="en", consent="Synthetic.", licence="mit")
    ours, theirs = load_model(folder), load_upstream(folder)
    table.add(case, "fp16", "published folder in upstream: weights", weights_differ(ours, theirs.state_dict()), 0)
    reference = dataset.with_mel(ours.config.mel).mel(dataset.clips[0])
    difference = samples_differ(ours, theirs, reference, seed)
    table.add(case, "fp32", "published folder in upstream: sample", difference, FP32)


def to_f5kit(table: Table, case: str, dataset: Dataset, work: Path, trained: Path, seed: int) -> None:
    """Upstream's finetune in f5kit's hands: both of its sets of weights."""
    saved = torch.load(trained / "model_last.pt", weights_only=True)
    averages = {k.removeprefix("ema_model."): v for k, v in saved["ema_model_state_dict"].items() if "transf" in k}
    options = dict(config=CASES[case], vocab=work / "upstream" / "vocab.txt")
    folders = {}
    for weights, expected in (("ema", averages), ("raw", saved["model_state_dict"])):
        folders[weights] = convert_model(
            trained / "model_last.pt", work / weights, "f5kit", weights=weights, **options
        )
        found = weights_differ(load_model(folders[weights]), expected)
        table.add(case, "fp32", f"upstream to f5kit: {weights} weights", found, 0)
    ours, theirs = load_model(folders["raw"]), upstream_model(CASES[case])
    theirs.load_state_dict(saved["model_state_dict"])
    theirs.vocab_char_map = {token: i for i, token in enumerate(VOCAB)}
    reference = dataset.with_mel(ours.config.mel).mel(dataset.clips[0])
    table.add(case, "fp32", "upstream to f5kit: sample", samples_differ(ours, theirs, reference, seed), FP32)
    named = readings(folders["raw"] / "model.safetensors").get(CASES[case].name)
    table.add(case, "-", "upstream to f5kit: a reading that fits", int(named != CASES[case]), 0)
    run = finetune(folders["raw"], dataset, work / "again")
    updates = [event["loss"] for event in run.events() if event["event"] == "update"]
    off = abs(len(updates) - UPDATES) if all(torch.tensor(updates).isfinite()) else float("inf")
    table.add(case, "-", f"f5kit's Trainer from it: {UPDATES} updates", off, 0)


def compare_mels(table: Table, rng: random.Random) -> None:
    """Both mels of sounds of random lengths, and BigVGAN's filterbank against librosa."""
    import librosa

    from f5kit.audio import frame_count, mel_filterbank

    for kind in ("vocos", "bigvgan"):
        ours, theirs, found, lengths = MelConfig(kind), MelSpec(mel_spec_type=kind), [], 0
        for _ in range(5):
            audio = torch.randn(1, rng.randint(600, 60_000)) * rng.choice((1e-3, 0.1, 0.5))
            mel, expected = log_mel(audio, ours), theirs(audio).transpose(1, 2)
            lengths += abs(mel.shape[1] - expected.shape[1]) + abs(mel.shape[1] - frame_count(audio.shape[1], ours))
            found.append((mel - expected).abs().max())
        table.add(f"mel {kind}", "-", "frames", lengths, 0)
        table.add(f"mel {kind}", "fp32", "log-mel, absolute", largest(found), FP32)
    bank = torch.from_numpy(librosa.filters.mel(sr=24_000, n_fft=1024, n_mels=100)).T
    difference = (mel_filterbank(MelConfig("bigvgan")) - bank).abs().max().item()
    table.add("mel bigvgan", "fp32", "filterbank and librosa's, absolute", difference, 1e-7)


def compare_bigvgan(table: Table, folder: Path) -> None:
    """The vocoder f5kit loads from the published layout, and the bigvgan package's own, of one second."""
    from bigvgan import BigVGAN
    from bigvgan.env import AttrDict

    from f5kit.vocoder import load_vocoder

    config = dict(
        num_mels=100, sampling_rate=24_000, n_fft=1024, hop_size=256, win_size=1024, fmin=0, fmax=None,
        upsample_rates=[4, 4, 2, 2, 2, 2], upsample_kernel_sizes=[8, 8, 4, 4, 4, 4], upsample_initial_channel=128,
        resblock="1", resblock_kernel_sizes=[3, 7], resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        activation="snakebeta", snake_logscale=True, use_bias_at_final=False, use_tanh_at_final=False,
    )  # fmt: skip
    folder.mkdir()
    theirs = BigVGAN(AttrDict(config)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    ours = load_vocoder(folder)
    mel = log_mel(0.1 * torch.randn(24_000), MelConfig("bigvgan"))
    with torch.no_grad():
        expected = theirs(mel.T[None])[0, 0]
    table.add("bigvgan", "fp32", "vocoder, one second", relative(ours.decode(mel), expected), FP32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.filterwarnings("ignore")
    print(f"checkpoints and mels, both ways, seed {seed}")
    table = Table()
    compare_mels(table, random.Random(seed))
    with tempfile.TemporaryDirectory() as temporary:
        compare_bigvgan(table, Path(temporary) / "bigvgan")
        dataset = small_dataset(Path(temporary) / "data")
        for case in CASES:
            work = Path(temporary) / case.replace(" ", "_")
            trained = to_upstream(table, case, dataset, work, seed)
            published_to_upstream(table, case, dataset, work, seed)
            to_f5kit(table, case, dataset, work, trained, seed)
    print(f"{table.rows} comparisons, {table.broken} above their bound")
    return 1 if table.broken else 0


if __name__ == "__main__":
    sys.exit(main())
