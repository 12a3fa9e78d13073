"""Batches: every clip once an epoch, little padding, fresh company, and nothing that depends on where a run resumed."""

import itertools
import pickle
import random
import shutil

import pytest
import torch

from f5kit.data import ahead, batches, epoch_batches, group, load_dataset, micro_batches, padding
from f5kit.errors import UserError
from f5kit.text import Tokenizer, english_vocab


def lengths(n, seed=0):
    rng = random.Random(seed)
    return [int(min(max(rng.lognormvariate(1.6, 0.5), 2), 12) * 93.75) for _ in range(n)]


@pytest.mark.parametrize("budget", [3_200, 14_000, 38_400])
@pytest.mark.parametrize("n", [40, 300, 3_000])
def test_every_clip_comes_once_an_epoch_within_the_padded_budget(n, budget):
    frames = lengths(n)
    for epoch in range(3):
        groups = epoch_batches(frames, budget, seed=1, epoch=epoch)
        assert sorted(itertools.chain(*groups)) == list(range(n))
        assert all(len(g) * max(frames[i] for i in g) <= budget for g in groups)


@pytest.mark.parametrize("budget", [3_200, 14_000, 38_400])
@pytest.mark.parametrize("n", [40, 300, 3_000])
def test_padding_stays_small(n, budget):
    """Under 3 % where an epoch has 100 micro-batches or more, else within 1 % of an exact sort by length."""
    frames = lengths(n)
    exact = padding(group(sorted(range(n), key=lambda i: -frames[i]), frames, budget), frames)
    for epoch in range(5):
        ratio = padding(epoch_batches(frames, budget, seed=2, epoch=epoch), frames)
        assert ratio <= exact + 0.01
        micro = [
            [g[p] for p in part]
            for g in epoch_batches(frames, budget, seed=2, epoch=epoch)
            for part in micro_batches(g, frames, budget)
        ]
        assert len(micro) < 100 or padding(micro, frames) < 1.03


def test_composition_is_fresh_every_epoch():
    frames = lengths(300)
    first, second = ({frozenset(g) for g in epoch_batches(frames, 14_000, 0, epoch)} for epoch in (0, 1))
    assert len(first & second) <= len(first) / 10


def test_a_clip_longer_than_the_budget_stands_alone_and_is_kept():
    assert group([0, 1, 2, 3], [900, 500, 100, 100], 600) == [[0], [1], [2, 3]]


def test_what_a_step_holds_does_not_depend_on_where_the_run_resumed():
    frames = lengths(50)
    whole = list(itertools.islice(batches(frames, 6_000, seed=3), 60))
    for first in (0, 1, 7, 33):
        assert list(itertools.islice(batches(frames, 6_000, seed=3, first=first), 10)) == whole[first : first + 10]


def test_micro_batches_hold_every_position_once():
    frames = lengths(80)
    members = list(range(10, 60))
    parts = micro_batches(members, frames, 2_000)
    assert sorted(itertools.chain(*parts)) == list(range(50))
    assert all(len(p) * max(frames[members[i]] for i in p) <= 2_000 for p in parts)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_made_ahead_comes_in_order(workers):
    made = []

    def slow(item):
        if item == 7:
            raise KeyError(item)
        made.append(item)
        return item * item

    items = ahead(itertools.count(), slow, workers)
    assert list(itertools.islice(items, 5)) == [(i, i * i) for i in range(5)]
    assert len(made) <= 5 + 2 * workers, "not further ahead than asked"
    assert [next(items), next(items)] == [(5, 25), (6, 36)]
    with pytest.raises(KeyError):
        next(items)


def test_cached_mels_are_computed_ones_in_half_precision(dataset):
    from f5kit.audio import log_mel, read_audio

    for clip in dataset.clips[:3]:
        mel = dataset.mel(clip)
        assert torch.equal(mel, log_mel(read_audio(dataset.path(clip))).half().float())
        assert mel.shape == (clip.frames, 100) and mel.dtype == torch.float32


def test_a_cache_that_was_removed_is_made_again_and_workers_map_it_themselves(dataset, tmp_path):
    shutil.copytree(dataset.folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "features")
    again = load_dataset(tmp_path / "copy")
    for clip in again.clips:
        assert torch.equal(again.mel(clip), dataset.mel(clip))
    there = pickle.loads(pickle.dumps(again))
    assert torch.equal(there.mel(there.clips[-1]), dataset.mel(dataset.clips[-1]))
    before = again.mel(again.clips[0]).clone()
    again.mel(again.clips[0]).zero_()  # what a caller does to its copy stays with it
    assert torch.equal(again.mel(again.clips[0]), before)


def test_a_batch_knows_its_clips(dataset):
    clips = dataset.clips[:3]
    batch = dataset.batch(clips, Tokenizer(english_vocab()), step=5, positions=[4, 0, 2])
    assert batch.mel.shape == (3, max(c.frames for c in clips), 100)
    assert batch.lens.tolist() == [c.frames for c in clips]
    assert batch.text_lens.tolist() == [len(c.text) for c in clips]
    assert (batch.text >= 0).sum(1).tolist() == batch.text_lens.tolist()
    assert batch.clip_ids == [c.id for c in clips]
    assert (batch.step, batch.positions.tolist()) == (5, [4, 0, 2])


def test_opening_what_is_no_dataset_says_so(tmp_path, dataset):
    with pytest.raises(UserError, match=r"no prepared dataset.*dataset.json.*01_prepare_data"):
        load_dataset(tmp_path)
    import shutil

    shutil.copytree(dataset.folder, tmp_path / "copy")
    lost = next((tmp_path / "copy" / "clips").iterdir())
    lost.unlink()
    with pytest.raises(UserError, match=f"names clips/{lost.name}, which is not there"):
        load_dataset(tmp_path / "copy")
    with open(tmp_path / "copy" / "manifest.jsonl", "a") as manifest:
        manifest.write("{half a row\n")
    with pytest.raises(UserError, match=r"manifest.jsonl line \d+ is not JSON"):
        load_dataset(tmp_path / "copy")


# --- the reference clip ---------------------------------------------------------------------------

SPOKEN = "This sentence is spoken at a pace that is usual for its voice, and it lasts six seconds or so."


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    """A function that prepares clips from {name: (seconds, level, noise level)} of speech-like bursts with pauses."""
    import soundfile

    from f5kit.prepare import prepare_dataset

    def make(**clips):
        folder = tmp_path_factory.mktemp("choices")
        for number, (name, (seconds, level, noise)) in enumerate(clips.items()):
            g = torch.Generator().manual_seed(number)
            time = torch.arange(int(seconds * 16_000)) / 16_000
            bursts = torch.sin(400 * torch.pi * time) * (torch.sin(torch.pi * time) > -0.5)  # a pause every two seconds
            sound = level * bursts + noise * torch.randn(len(time), generator=g)
            soundfile.write(folder / f"{name}.wav", sound.numpy(), 16_000)
            letters = int(len(SPOKEN) * seconds / 6)
            (folder / f"{name}.txt").write_text((SPOKEN * 3)[:letters].strip())
        return prepare_dataset(folder, folder.with_name(folder.name + "_out"), heldout=0, progress=False)

    return make


def test_the_reference_is_of_good_length_and_clean(choices):
    usual = {f"u{i}": (4.2, 0.2, 1e-4) for i in range(3)}
    assert choices(**usual, good=(6, 0.2, 1e-4), long=(12, 0.2, 1e-4)).typical_clip().id == "good"
    noisy = choices(**usual, noisy=(6, 0.2, 0.02)).typical_clip()
    assert noisy.id in usual  # six seconds long, and with the noise 20 dB below the speech
    assert choices(**usual, quiet=(6, 0.01, 1e-5)).typical_clip().id in usual
    assert choices(a=(6, 0.2, 0.02), b=(6, 0.2, 0.03), c=(6.1, 0.2, 0.04)).typical_clip().id == "a"


def test_a_reference_is_never_longer_than_asked(choices):
    with pytest.raises(UserError, match="no clip below 1 s"):
        choices(short=(2, 0.2, 1e-4), good=(6, 0.2, 1e-4)).typical_clip(1.0)


def test_a_clip_can_be_named(dataset):
    clip = dataset.clips[2]
    assert dataset.clip(clip.id) == clip
    with pytest.raises(UserError, match="no clip 'nobody'"):
        dataset.clip("nobody")


def test_what_was_measured_travels_with_the_clip(dataset):
    for clip, row in zip(dataset.clips, dataset.rows(), strict=True):
        assert (clip.rms_dbfs, clip.snr) == (row["measures"]["rms_dbfs"], row["measures"]["snr"])
        assert clip.snr > 20  # a synthesiser's pauses are clean


def nasty(kind, n, rng):
    """Lengths in frames that real collections come with, and worse."""
    return {
        "all alike": lambda: [700] * n,
        "two kinds": lambda: [rng.choice((94, 2_800)) for _ in range(n)],
        "one giant": lambda: [rng.randint(90, 400) for _ in range(n - 1)] + [6_000],
        "heavy tail": lambda: [int(min(94 * rng.paretovariate(1.1), 2_800)) for _ in range(n)],
        "flat": lambda: [rng.randint(30, 2_800) for _ in range(n)],
        "growing": lambda: [30 + int(1.01**i) % 2_700 for i in range(n)],
        "three clips": lambda: [50, 51, 2_800],
    }[kind]()


NASTY = ["all alike", "two kinds", "one giant", "heavy tail", "flat", "growing", "three clips"]


@pytest.mark.parametrize("kind", NASTY)
def test_a_thousand_batches_never_exceed_the_plans_padded_budget(kind):
    """Neither an update nor any pass of it, whatever the lengths; and no clip is left out of any epoch."""
    rng = random.Random(kind)
    frames = nasty(kind, 333, rng)
    update = max(14_000, max(frames))  # as `plan_run` has it: the longest clip always fits
    micro = max(3_200, max(frames))
    seen, steps = [0] * len(frames), 0
    for _, members in itertools.islice(batches(frames, update, seed=4), 1_000):
        assert len(members) * max(frames[i] for i in members) <= update
        for part in micro_batches(members, frames, micro):
            assert len(part) * max(frames[members[p]] for p in part) <= micro
            for p in part:
                seen[members[p]] += 1
        steps += 1
    assert steps == 1_000 and max(seen) - min(seen) <= 1 and min(seen) > 0
