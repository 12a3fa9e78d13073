"""Publishing a voice: an export folder with a model card, a private push to the Hugging Face Hub, a check.

    runs/my_voice/export/
      model.safetensors  config.json  vocab.txt    the weights alone, and what they mean (tokenizer and normaliser too)
      model.yaml                                   the same for upstream's code, which reads these files as they are
      reference.wav  reference.txt                 the recording the voice continues, and its words
      samples/                                     sounds it made
      export.json                                  the run's own figures: all that the card states
      README.md                                    the model card

Nothing but these files is ever pushed, and nothing is pushed unless it is asked for.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from f5kit.audio import read_audio, write_audio
from f5kit.card import check_licence, judged_figures, model_card, run_figures, upstream_obstacle
from f5kit.checkpoint import RunFolder, export_model, load_model
from f5kit.convert import write_yaml
from f5kit.errors import UserError
from f5kit.inference import Speech, Voice, find_pace, find_reference
from f5kit.provenance import read_provenance
from f5kit.push import Push, PushJob, hub_errors
from f5kit.repository import find_token
from f5kit.weights import read_tensors, write_json

FILES = ("model.safetensors", "config.json", "vocab.txt", "reference.wav", "reference.txt", "export.json")
FILES += ("README.md", "model.yaml", "samples/*.wav")
SAME_VOICE = 0.1  # two log-mels that differ less, on average, are one but for rounding
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class PublishResult:
    """What `publish` did."""

    folder: Path
    """The export."""
    url: str | None
    """Where it stands now; None when nothing was pushed."""
    files: dict[str, int]
    """What is, or would be, pushed, with sizes in bytes."""
    dry_run: bool
    """Nothing was pushed."""
    why: str
    """In a sentence."""
    push: Push | None = None
    """A push that is still on its way, with `background`."""

    def __str__(self) -> str:
        megabytes = sum(self.files.values()) / 1e6
        return f"{len(self.files)} files, {megabytes:.1f} MB in {self.folder}; {self.why}"


@dataclass(frozen=True)
class Verification:
    """What `verify_export` heard."""

    ok: bool
    speech: Speech
    distance: float | None
    """Mean distance of its log-mel to the original voice's; None where there is none to compare."""
    why: str

    def __str__(self) -> str:
        return f"{'passed' if self.ok else 'FAILED'}: {self.why}"


def build_export(
    run: str | Path | RunFolder,
    folder: str | Path,
    *,
    language: str | Sequence[str],
    consent: str | None = None,
    samples: Sequence[Speech | str | Path] = (),
    weights: str | None = None,
    licence: str | None = None,
    reference: tuple[str | Path, str] | None = None,
    repo_id: str | None = None,
    precision: str = "fp16",
    judged: str | Path | None = None,
) -> Path:
    """Write the export of a run's chosen checkpoint; returns `folder`, which appears whole, by one rename.

    language: codes like "en". consent: who is speaking, and what they have agreed to; by default what the dataset was
    prepared with. judged: a folder of the judge's report, for the card. samples: what
    `Voice.speak` gave, or sound files. weights: "ema" or "raw", by default the run's choice. licence: by
    default the base model's. reference: a recording and its words, by default the most typical clip.
    repo_id: "you/my-voice", for the card. precision: "fp16" or "fp32", of the stored weights.

    Raises UserError where nobody has stated consent, for a damaged checkpoint, or a licence that the base forbids.
    """
    run, folder = run if isinstance(run, RunFolder) else RunFolder(run), Path(folder)
    if precision not in _DTYPES:
        raise UserError(f"precision is {precision!r}; choose one of {', '.join(_DTYPES)}")
    if folder.exists() and not (folder / "export.json").is_file():
        raise UserError(f"{folder} is there and is no export: name another folder, or remove it")
    weights = weights or (run.best or {}).get("weights") or "ema"
    facts = run_figures(run, weights)
    facts["consent"] = (facts.get("consent", "") if consent is None else consent).strip()
    if not facts["consent"]:
        raise UserError("consent is empty: say in a sentence who is speaking and what they have agreed to")
    facts |= {"judged": judged_figures(judged)} if judged else {}
    facts["licence"] = check_licence(facts["base"], facts.pop("base_licence"), licence)
    facts["language"] = [language] if isinstance(language, str) else list(language)
    facts["precision"] = precision
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        model = load_model(run.path, weights=weights)
        facts["upstream_obstacle"] = upstream_obstacle(model.config)
        facts["parameters"] = _write_model(model, partial, precision, facts["upstream_obstacle"] is None)
        facts["reference"] = _write_reference(partial, *(reference or find_reference(run.path)))
        facts["pace"] = asdict(find_pace(run.path))
        facts["samples"] = [_write_sample(partial, i, sample) for i, sample in enumerate(samples, 1)]
        write_json(partial / "export.json", facts)
        (partial / "README.md").write_text(model_card(facts, repo_id), encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp shuts other users out
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def publish(
    source: str | Path | RunFolder,
    repo_id: str | None = None,
    *,
    card: dict | None = None,
    folder: str | Path | None = None,
    token: str | None = None,
    private: bool = True,
    dry_run: bool = True,
    background: bool = False,
) -> PublishResult:
    """Push a voice to the Hub: a folder of `build_export`, or a run, exported first to export/ or `folder`.

    card: for a run, the keywords of `build_export`, {"language": "en"} at least. The token is the secret HF_TOKEN or a
    login's; without one, or with `dry_run`, nothing leaves this machine. The repository gets one commit, which holds
    all of it, by a process of its own (`f5kit.push`): what breaks is tried again, and what was uploaded stays uploaded.
    background: return at once; the result's `push` tells how it ends.
    Raises UserError when the Hub refuses, and when a private push would land in a public repository.
    """
    path = source.path if isinstance(source, RunFolder) else Path(source)
    if (path / "export.json").is_file():
        if card:
            raise UserError(f"{path} has its card already: edit its README.md, or publish the run again")
        _name_repository(path, repo_id)
    else:
        needed = {"language"}
        known = set(inspect.signature(build_export).parameters) - {"run", "folder", "repo_id"}
        card = card or {}
        if not needed <= card.keys() <= known:
            raise UserError(f"card has {sorted(card)}; it needs {sorted(needed)} and takes {sorted(known)}")
        path = build_export(path, folder or path / "export", repo_id=repo_id, **card)
    there = sorted(file for name in FILES for file in path.glob(name))
    files = {file.relative_to(path).as_posix(): file.stat().st_size for file in there}
    if dry_run:
        return PublishResult(path, None, files, True, "dry run, nothing was pushed")
    if not repo_id or repo_id.count("/") != 1:
        raise UserError(f"repo_id is {repo_id!r}: name the repository to publish to, as in 'you/my-voice'")
    token = token or find_token()
    if not token:
        return PublishResult(path, None, files, True, "no HF_TOKEN was found, nothing was pushed")
    stale = ("samples/*.wav", "model.yaml")
    job = PushJob(repo_id, str(path), tuple(files), "Publish the voice", private, replace=stale)
    push = Push(job, token)
    if background:
        return PublishResult(path, None, files, False, f"on its way to {repo_id}; push.wait() tells the end", push)
    url = push.wait()
    return PublishResult(path, url, files, False, f"pushed to {url}, {'private' if private else 'public'}")


def verify_export(
    source: str | Path,
    text: str,
    original: Voice | None = None,
    *,
    steps: int = 16,
    seed: int = 0,
    token: str | None = None,
) -> Verification:
    """Load an export folder, or a repository of the Hub fetched into an empty folder, and let it speak.

    It passes when the sound is finite and not silent and, with `original`, when both say the text alike: the
    same length, and log-mels that differ by rounding alone. Raises UserError when it cannot be had or loaded.
    """
    if not Path(source).is_dir():
        with tempfile.TemporaryDirectory(prefix="f5kit-verify-") as folder:
            _download(str(source), token, Path(folder))
            heard = verify_export(folder, text, original, steps=steps, seed=seed)
            return replace(heard, why=heard.why.replace(folder, str(source)))
    folder = Path(source)
    device = original.model.device.type if original else None
    voice = Voice.load(folder, vocoder=original.vocoder if original else "auto", device=device)
    voice.precision = original.precision if original else voice.precision
    speech = voice.speak(text, steps=steps, seed=seed, progress=False)
    if not speech.audio.isfinite().all() or speech.audio.abs().max() < 1e-4:
        return Verification(False, speech, None, f"{source} is silent or not finite: export it as 'fp32'")
    if original is None:
        return Verification(True, speech, None, f"{source} loads and speaks; it was compared with nothing")
    expected = original.speak(text, steps=steps, seed=seed, progress=False)
    if expected.mel.shape != speech.mel.shape:
        lengths = f"it says this in {len(speech.mel)} frames and the original in {len(expected.mel)}"
        return Verification(False, speech, None, f"{lengths}: the references differ")
    distance = (expected.mel - speech.mel).abs().mean().item()
    told = f"its log-mel is {distance:.4f} from the original's, where {SAME_VOICE} is allowed"
    return Verification(distance < SAME_VOICE, speech, distance, told)


# ---- the export


def _write_model(model, folder: Path, precision: str, for_upstream: bool) -> int:
    """Returns the number of parameters."""
    file = export_model(model, folder, _DTYPES[precision]) / "model.safetensors"
    if not all(tensor.isfinite().all() for tensor in read_tensors(file).values()):
        raise UserError(f"{precision} cannot hold the weights of {model.origin}: say precision='fp32'")
    if for_upstream:
        write_yaml(model.config, folder / "model.yaml")
    return sum(parameter.numel() for parameter in model.parameters())


def _write_reference(folder: Path, audio: str | Path, words: str) -> str:
    write_audio(folder / "reference.wav", read_audio(audio), provenance=read_provenance(audio))
    (folder / "reference.txt").write_text(words.strip() + "\n", encoding="utf-8")
    return words.strip()


def _write_sample(folder: Path, number: int, sample: Speech | str | Path) -> dict:
    (folder / "samples").mkdir(exist_ok=True)
    name = f"samples/{number:02d}.wav"
    if isinstance(sample, Speech):
        sample.save(folder / name)
        return {"file": name, "text": sample.text, "seed": sample.seed}
    write_audio(folder / name, read_audio(sample), provenance=read_provenance(sample))
    return {"file": name}


def _name_repository(folder: Path, repo_id: str | None) -> None:
    """Let a card that nobody has edited name the repository it goes to."""
    facts = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    if repo_id and (folder / "README.md").read_text(encoding="utf-8") == model_card(facts):
        (folder / "README.md").write_text(model_card(facts, repo_id), encoding="utf-8")


# ---- the Hub


def _download(repo_id: str, token: str | None, folder: Path) -> Path:
    """The repository in an empty folder, from the Hub and not from the cache."""
    from huggingface_hub import snapshot_download

    if repo_id.count("/") != 1:
        raise UserError(f"there is no export {repo_id}: name a folder, or a repository as in 'you/my-voice'")
    with hub_errors(f"the Hub did not give {repo_id}", "check its name, the token and the connection"):
        token = token or find_token()
        return Path(snapshot_download(repo_id, token=token, allow_patterns=list(FILES), local_dir=folder))
