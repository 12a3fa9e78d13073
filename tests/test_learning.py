"""Training learns speech and not averages.

The bar is the loss of the best predictor that knows only each mel bin's mean and deviation: (pi / 2) times the
mean deviation of the bins (derived and checked in test_model.py). Speech has structure beyond that, so a model
that learns it goes well below the bar. In a run whose frames were shuffled, each bin by itself, there is nothing
beyond averages, and it must not.
"""

import pytest
import torch

from f5kit.data import Dataset
from f5kit.evaluate import dataset_loss, loss_of_averages
from f5kit.host import detect_host
from f5kit.plan import plan_run
from f5kit.prepare import prepare_dataset
from f5kit.trainer import Trainer

UPDATES = 350


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return prepare_dataset("demo", tmp_path_factory.mktemp("data") / "demo", progress=False)


def learned_share(dataset, folder) -> float:
    """Held-out loss after training, as a share of the bar."""
    plan = plan_run(
        "tiny", dataset, detect_host("cpu"), updates=UPDATES, learning_rate=5e-3, update_frames=1_600, precision="fp32"
    )
    trainer = Trainer(plan, dataset, folder)
    trainer.fit()
    return dataset_loss(trainer.model, dataset) / loss_of_averages(dataset, trainer.model.config)


def test_speech_is_learned_beyond_its_averages(demo, tmp_path):
    assert learned_share(demo, tmp_path / "speech") < 0.8


def test_shuffled_speech_teaches_nothing_beyond_averages(demo, tmp_path, monkeypatch):
    mel = Dataset.mel

    def shuffled(self, clip):
        original = mel(self, clip)
        g = torch.Generator().manual_seed(len(original))
        order = torch.rand(original.shape, generator=g).argsort(dim=0)  # each bin its own order of frames
        return original.gather(0, order)

    monkeypatch.setattr(Dataset, "mel", shuffled)
    assert learned_share(demo, tmp_path / "shuffled") > 0.8
