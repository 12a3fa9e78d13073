"""Trains the starter voice: f5kit's own DiT and Trainer on the corpus of make_corpus.py, on two CPU cores or on a GPU.

    python benchmarks/starter/train_starter.py build/corpus build/starter --updates 6000

It can be stopped at any time and started again, and goes on from its newest checkpoint. Four things are special:

- In training only, a teacher who knows the synthesiser's own times (phonemes.py) asks the text embedding and a middle
  block which phoneme each frame says, and at first spreads the letters as they were said. So spelling and timing are
  learned at every noise level, far sooner than from the flow-matching loss alone (results/starter_trials.json). Later
  the model spreads them as it hears them, as it will have to.
- Half of the times are below 1/4, where words and voice are decided.
- Muon in place of AdamW for the blocks' matrices.
- All batches have one of a few shapes, so that the compiled blocks serve the whole run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from make_corpus import VOICES
from phonemes import PhonemeGuide, PhonemeTimes
from torch.nn.attention import SDPBackend, sdpa_kernel

from f5kit.cfm import draw
from f5kit.checkpoint import export_model, fresh_model
from f5kit.config import PRESETS, TrainConfig
from f5kit.data import load_dataset
from f5kit.host import detect_host
from f5kit.optim import learning_rate
from f5kit.plan import plan_run
from f5kit.prepare import prepare_dataset
from f5kit.text import Tokenizer, english_vocab
from f5kit.trainer import Trainer

SHAPES = (128, 192, 256, 320, 416, 640, 832)  # frames of a batch; longer clips are not used
SEED = 4


class StarterTrainer(Trainer):
    """The trainer with batches of a few fixed shapes, each drawn by its step alone."""

    def __init__(self, *args, phonemes: PhonemeTimes, voices: Sequence[str], taught: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._phonemes, self._voices, self._taught = phonemes, voices, taught

    def _setup_model(self, checkpoint) -> None:
        super()._setup_model(checkpoint)
        transformer = self.model.transformer
        parts = [*transformer.transformer_blocks, transformer.input_embed]
        self._forwards = [(part, part.forward, torch.compile(part.forward, dynamic=False)) for part in parts]
        self._compile(True)

    def _compile(self, on: bool) -> None:
        for part, plain, compiled in self._forwards:
            part.forward = compiled if on else plain

    def _setup_optimizer(self, checkpoint) -> None:
        """Muon for the blocks' matrices, the trainer's own AdamW for all else, and the guide beside them.

        Muon's momentum and the guide's few weights are kept in no checkpoint: they are learned again in seconds.
        """
        super()._setup_optimizer(checkpoint)
        named = self.model.transformer.transformer_blocks.named_parameters()
        self._matrices = [p for name, p in named if p.ndim == 2 and "attn_norm" not in name]
        self._muon = torch.optim.Muon(self._matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self._guide = PhonemeGuide(self.model, self._phonemes)
        self._guide_optimizer = torch.optim.AdamW(self._guide.parameters(), lr=1e-3)
        flow = self._forward
        self._forward = lambda batch, draws: flow(batch, draws) + self._guide.loss(batch, draws)

    def _gradients(self, *args):
        self._guide_optimizer.zero_grad()
        return super()._gradients(*args)

    def _apply(self) -> float:
        self._guide_optimizer.step()
        self._muon.param_groups[0]["lr"] = learning_rate(self.update, self.config)
        self._muon.step()
        for p in self._matrices:  # AdamW passes over what has no gradient
            p.grad = None
        return super()._apply()

    def _setup_data(self) -> None:
        super()._setup_data()
        self._bins = {n: [] for n in SHAPES}
        for i, frames in enumerate(self._frames):
            if frames <= SHAPES[-1] and self._clips[i].id.split("_")[0] in self._voices:
                self._bins[next(n for n in SHAPES if frames <= n)].append(i)

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        weights = [n * len(self._bins[n]) for n in SHAPES]  # a clip of each length is as likely as any other
        for step in count(self.step):
            rng = random.Random(f"{self.config.seed}/{step}")
            n = rng.choices(SHAPES, weights)[0]
            yield step, rng.sample(self._bins[n], self.config.update_frames // n)

    def _parts(self, step: int, members: list[int]):
        batch = self.dataset.batch([self._clips[i] for i in members], self.model.tokenizer, step)
        n = next(n for n in SHAPES if batch.mel.shape[1] <= n)
        batch.mel = F.pad(batch.mel, (0, 0, 0, n - batch.mel.shape[1]))
        if self.update < self._taught:
            batch.letter_lengths = self._guide.letter_lengths(batch)
        draws = draw(batch, self.config.seed)
        draws.time = draws.time.square()
        yield batch, draws

    def said(self) -> str:
        """How well the teacher is followed."""
        return self._guide.said()

    def _evaluate(self) -> None:
        """Judging has shapes of its own, so it runs the blocks as they are."""
        self._compile(False)
        super()._evaluate()
        self._compile(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--update-frames", type=int, default=3584)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--taught", type=int, default=2000, help="updates with letters spread by the teacher")
    parser.add_argument("--voices", nargs="+", default=list(VOICES), help="speakers to learn; one is learned sooner")
    args = parser.parse_args()
    data = args.out / "data"
    dataset = load_dataset(data) if data.is_dir() else prepare_dataset(args.corpus / "train", data, max_seconds=12)
    fresh = args.out / "fresh"
    if not fresh.is_dir():
        export_model(fresh_model(PRESETS["starter"], Tokenizer(english_vocab()), SEED), fresh, dtype=torch.float32)
    train = TrainConfig(
        updates=args.updates, learning_rate=args.learning_rate, warmup_updates=100, update_frames=args.update_frames,
        micro_frames=args.update_frames, ema_horizon=args.updates // 20, evaluate_every=args.save_every,
        save_every=args.save_every, keep_checkpoints=2, precision=args.precision, seed=SEED,
    )  # fmt: skip
    plan = replace(plan_run(str(fresh), dataset, detect_host(), updates=args.updates), train=train)
    with sdpa_kernel(SDPBackend.MATH):  # at this size faster than fused attention on a CPU
        phonemes = PhonemeTimes.read(args.corpus, dataset, args.out / "phonemes.pt")
        StarterTrainer(plan, dataset, args.out / "run", [report], phonemes=phonemes, voices=args.voices,
                       taught=args.taught).fit()


def report(event: dict, trainer: Trainer) -> None:
    """One line a judgement, and every 20th update."""
    update = f"{event['update']:6d}"
    if event["event"] == "evaluate":
        print(f"{update}  held-out loss {event['loss_raw']:.4f} raw, {event['loss_ema']:.4f} EMA", flush=True)
    elif event["event"] == "update" and event["update"] % 20 == 0:
        print(f"{update}  loss {event['loss']:.4f}  {trainer.said()}  {event['seconds']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
