"""A prepared dataset folder: its manifest, its mel cache, and the batches that travel to the loss.

The folder (written by `prepare.py`):

    dataset.json     name, source and its hash, seconds, mel definition, normaliser, tokenizer and their hash,
                     and what the speaker has agreed to
    manifest.jsonl   one row for every clip that is used
    clips/*.flac     24 kHz mono
    report.jsonl     one row for every clip that was seen, with its verdict
    report.json, report.png
    vocab.txt        the tokenizer's tokens: the target model's, or the letters of the texts
    features/        log-mels, fp16, mapped into memory (`features.py`)
    journal.sqlite   what preparation knows, for the next time

Mel is (n, d) or (b, n, d): frames, then bins.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from f5kit.audio import frame_count, log_mel, read_audio
from f5kit.config import MelConfig
from f5kit.errors import UserError
from f5kit.features import Features, FeatureWriter, write_index
from f5kit.text import Tokenizer
from f5kit.weights import write_json

FORMAT = 3
DEMO_CONSENT = "The bundled demo voice is synthetic: there is no speaker to ask."


@dataclass(frozen=True, slots=True)
class Clip:
    """One usable recording with its transcript."""

    id: str
    audio: str
    """Path below the dataset folder."""
    text: str
    seconds: float
    frames: int
    split: str
    """"train" or "heldout"."""
    rms_dbfs: float
    """Level as recorded, dB below full scale."""
    snr: float
    """Speech over noise, dB (`audit.estimate_snr`)."""
    speaker: str | None = None
    language: str | None = None
    row: int = -1
    """Its place in the manifest, and in the feature cache."""


@dataclass
class Batch:
    """What travels from data to loss. Shapes: b items, n frames, nt tokens."""

    mel: Tensor
    """b n d, raw log-mel, fp32; 0 behind an item's end."""
    lens: Tensor
    """b, frames of each item."""
    text: Tensor
    """b nt, int64, -1 behind an item's end."""
    text_lens: Tensor
    """b, tokens of each item."""
    clip_ids: list[str]
    step: int
    """Which batch of the run this is part of; with `positions` it keys the randomness."""
    positions: Tensor
    """b, each clip's place in the whole batch of that step."""
    letter_lengths: Tensor | None = None
    """b nt, frames that each letter lasts, for models that spread their text by them; below 0 for an item where that is
    unknown and to be searched for."""

    @property
    def mask(self) -> Tensor | None:
        """b n, true on an item's own frames; None when all fill the batch. Ask on the CPU: on a GPU this waits."""
        n = self.mel.shape[1]
        if bool((self.lens == n).all()):
            return None
        return torch.arange(n, device=self.lens.device)[None] < self.lens[:, None]


def collate(mels: Sequence[Tensor], texts: Sequence[Sequence[int]], clip_ids, step: int, positions) -> Batch:
    """Pad mels (n, d) and token lists to one batch."""
    return Batch(
        mel=torch.nn.utils.rnn.pad_sequence(list(mels), batch_first=True),
        lens=torch.tensor([len(m) for m in mels]),
        text=torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(t, dtype=torch.long) for t in texts], batch_first=True, padding_value=-1
        ),
        text_lens=torch.tensor([len(t) for t in texts]),
        clip_ids=list(clip_ids),
        step=step,
        positions=torch.tensor(list(positions)),
    )


def to_device(value, device):
    """A copy of a dataclass of tensors with every tensor on `device`."""
    moved = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{k: v.to(device, non_blocking=True) for k, v in moved.items() if torch.is_tensor(v)})


class Dataset:
    """A prepared dataset folder, opened by `load_dataset`."""

    def __init__(self, folder: Path, info: dict, clips: list[Clip], manifest_hash: str):
        self.folder, self.info, self.clips, self.manifest_hash = folder, info, clips, manifest_hash
        self.name = info["name"]
        self.mel_config = MelConfig(**info["mel"])

    @property
    def consent(self) -> str:
        """Who is speaking, and what they have agreed to; empty where nobody has said."""
        return self.info.get("consent", "")

    @property
    def train(self) -> list[Clip]:
        return [clip for clip in self.clips if clip.split == "train"]

    @property
    def heldout(self) -> list[Clip]:
        """Clips that no training step sees."""
        return [clip for clip in self.clips if clip.split == "heldout"]

    @property
    def seconds(self) -> float:
        return sum(clip.seconds for clip in self.clips)

    def __repr__(self) -> str:
        return (
            f"{self.name}: {len(self.train)} clips to train on and {len(self.heldout)} held out, "
            f"{self.seconds / 60:.1f} minutes ({self.folder})"
        )

    def with_mel(self, mel: MelConfig) -> Dataset:
        """The same clips with mels of another kind, for a model that was trained on it.

        Raises UserError when the definitions differ in more than their kind.
        """
        if mel == self.mel_config:
            return self
        if replace(mel, kind=self.mel_config.kind) != self.mel_config:
            raise UserError(
                f"{self.folder} was prepared for {self.mel_config} and the model reads {mel}: prepare it for that mel"
            )
        more = frame_count(0, mel) - frame_count(0, self.mel_config)
        clips = [replace(clip, frames=clip.frames + more) for clip in self.clips]
        return Dataset(self.folder, {**self.info, "mel": asdict(mel)}, clips, self.manifest_hash)

    def path(self, clip: Clip) -> Path:
        """The clip's audio file."""
        return self.folder / clip.audio

    @cached_property
    def report(self) -> dict:
        """What preparation found, from report.json."""
        return json.loads((self.folder / "report.json").read_text(encoding="utf-8"))

    def clip(self, id: str) -> Clip:
        """The clip of that id. Raises UserError with the first ids there are."""
        for clip in self.clips:
            if clip.id == id:
                return clip
        there = ", ".join(clip.id for clip in self.clips[:3])
        raise UserError(f"{self.folder} has no clip {id!r}: its {len(self.clips)} clips are {there} and so on")

    def typical_clip(self, longest: float = 15.0) -> Clip:
        """The training clip that serves best as a reference, from what preparation measured; no sound is read.

        The clip with the least sum of: its distance from 6 seconds, in 6 seconds; from the usual pace, as a share of
        it; from the usual level, in 10 dB; and what its noise lacks to 40 dB below the speech, in 20 dB. Raises
        UserError when every clip is longer than `longest` seconds.
        """
        usable = [clip for clip in self.train if clip.seconds <= longest]
        if not usable:
            raise UserError(f"{self.folder} has no clip below {longest:g} s to refer to: give a reference")
        pace = statistics.median(len(clip.text) / clip.seconds for clip in self.train)
        level = statistics.median(clip.rms_dbfs for clip in self.train)

        def fault(clip: Clip) -> float:
            fault = abs(clip.seconds - 6) / 6 + abs(len(clip.text) / clip.seconds - pace) / pace
            return fault + abs(clip.rms_dbfs - level) / 10 + max(0.0, 40 - clip.snr) / 20

        return min(usable, key=fault)

    def sample_clip(self) -> Clip:
        """A held-out clip of middling length, to be said again by models (a training clip when none is held out)."""
        clips = sorted(self.heldout or self.train, key=lambda clip: clip.seconds)
        return clips[len(clips) // 2]

    @property
    def judged(self) -> list[Clip]:
        """The clips that losses are taken on: at most 16 held-out ones (training ones if none)."""
        return (self.heldout or self.train)[:16]

    def judging_batches(self, tokenizer: Tokenizer) -> list[Batch]:
        """The judged clips, in batches of four."""
        clips = sorted(self.judged, key=lambda clip: clip.frames)
        return [self.batch(clips[i : i + 4], tokenizer) for i in range(0, len(clips), 4)]

    def rows(self) -> list[dict]:
        """Every row of the report: each clip that was seen, the rejected ones too."""
        return list(_read_rows(self.folder / "report.jsonl"))

    @cached_property
    def _features(self) -> Features:
        folder = self.folder / "features" / self.mel_config.kind
        if not Features.has(folder, self.manifest_hash):
            self._make_features(folder)
        return Features(folder, self.manifest_hash, self.mel_config.n_mels)

    def mel(self, clip: Clip) -> Tensor:
        """Log-mel of a clip, (frames, bins), from the cache; the first call for another kind of mel makes its cache."""
        return self._features[clip.row]

    def _make_features(self, folder: Path) -> None:
        from tqdm.auto import tqdm

        writer, rows = FeatureWriter(folder, self.mel_config.n_mels), []
        for clip in tqdm(self.clips, desc="mels", unit="clip", disable=len(self.clips) < 500):
            audio = read_audio(self.path(clip), self.mel_config.sample_rate)
            rows.append(writer.add(log_mel(audio, self.mel_config).half().numpy()))
        writer.close()
        write_index(folder, self.manifest_hash, rows)

    def batch(self, clips: Sequence[Clip], tokenizer: Tokenizer, step: int = 0, positions=None) -> Batch:
        """The clips as one padded batch."""
        positions = range(len(clips)) if positions is None else positions
        return collate(
            [self.mel(clip) for clip in clips],
            [tokenizer.encode(clip.text) for clip in clips],
            [clip.id for clip in clips],
            step,
            positions,
        )


def read_clips(folder: Path) -> list[Clip]:
    """The clips that a dataset's manifest names."""
    names = [f.name for f in fields(Clip) if f.name != "row"]
    rows = enumerate(_read_rows(folder / "manifest.jsonl"))
    return [Clip(**{name: row[name] for name in names}, row=place) for place, row in rows]


def _read_rows(path: Path) -> Iterator[dict]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                raise UserError(f"{path} line {number} is not JSON: prepare the dataset again") from None


def write_consent(folder: Path, consent: str) -> None:
    """Put the speaker's consent into dataset.json; an empty one leaves what stands there."""
    file = folder / "dataset.json"
    info = json.loads(file.read_text(encoding="utf-8"))
    told = consent.strip() or info.get("consent", "")
    if info.get("consent") != told:
        write_json(file, {**info, "consent": told})


def load_dataset(folder: str | Path) -> Dataset:
    """Open a folder that `prepare_dataset` made.

    Raises UserError, naming the file, when the folder or a clip's audio is missing or the manifest is damaged.
    """
    folder = Path(folder)
    for name in ("dataset.json", "manifest.jsonl"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} is no prepared dataset, it has no {name}: run notebook 01_prepare_data first"
            )
    info = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    if info.get("format") != FORMAT:
        raise UserError(f"{folder} was prepared by another version of f5kit: prepare it again")
    clips = read_clips(folder)
    for clip in clips:
        if not (folder / clip.audio).is_file():
            raise UserError(f"{folder}/manifest.jsonl names {clip.audio}, which is not there: prepare it again")
    manifest_hash = hashlib.sha256((folder / "manifest.jsonl").read_bytes()).hexdigest()
    return Dataset(folder, info, clips, manifest_hash)


def group(order: Sequence[int], frames: Sequence[int], budget: int) -> list[list[int]]:
    """Cut `order` into consecutive groups whose padded frames (count times longest) stay within `budget`.

    A clip longer than the budget stands alone: it is never dropped.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, frames[i])
        if groups and (len(groups[-1]) + 1) * longest <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = frames[i]
    return groups


def padding(groups: Sequence[Sequence[int]], frames: Sequence[int]) -> float:
    """Padded frames over real frames."""
    padded = sum(len(g) * max(frames[i] for i in g) for g in groups)
    return padded / sum(frames[i] for g in groups for i in g)


def epoch_batches(frames: Sequence[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch: every clip once, in batches of near-equal lengths, composed afresh and shuffled.

    Clips are sorted by a jittered length, with as much jitter as keeps the padding within 1 % of an exact sort. The
    order depends on the seed and the epoch alone.
    """
    rng = random.Random(f"{seed}/{epoch}")
    noise = [rng.uniform(-1, 1) for _ in frames]
    exact = padding(group(sorted(range(len(frames)), key=lambda i: -frames[i]), frames, budget), frames)
    for jitter in (0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0):
        order = sorted(range(len(frames)), key=lambda i: (-frames[i] * (1 + jitter * noise[i]), noise[i]))
        groups = group(order, frames, budget)
        if padding(groups, frames) <= exact + 0.01:
            break
    rng.shuffle(groups)
    return groups


def batches(frames: Sequence[int], budget: int, seed: int, first: int = 0) -> Iterator[tuple[int, list[int]]]:
    """(step, indices of clips) for ever, from step `first`; what a step holds does not depend on `first`."""
    step = 0
    epoch = 0
    while True:
        for members in epoch_batches(frames, budget, seed, epoch):
            if step >= first:
                yield step, members
            step += 1
        epoch += 1


def micro_batches(members: Sequence[int], frames: Sequence[int], budget: int) -> list[list[int]]:
    """Positions in `members`, cut by length into forward passes of at most `budget` padded frames."""
    lengths = [frames[i] for i in members]
    return group(sorted(range(len(members)), key=lambda p: -lengths[p]), lengths, budget)



def ahead(items: Iterable, make: Callable, workers: int) -> Iterator[tuple]:
    """(item, make(item)) in order, made by `workers` threads up to twice as many items ahead; 0: when it is due."""
    if workers == 0:
        yield from ((item, make(item)) for item in items)
        return
    items = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        waiting = deque((item, pool.submit(make, item)) for item in islice(items, 2 * workers))
        try:
            while waiting:
                item, made = waiting.popleft()
                waiting.extend((later, pool.submit(make, later)) for later in islice(items, 1))
                yield item, made.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
