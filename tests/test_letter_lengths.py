"""A text spread over its frames by how long each letter is expected to last."""

import pytest
import torch

from f5kit import load_model
from f5kit.checkpoint import export_model, fresh_model
from f5kit.config import PRESETS
from f5kit.convert import require_upstream
from f5kit.errors import UserError
from f5kit.inference import Reference, Voice
from f5kit.layers import spread, spread_by_length
from f5kit.text import Tokenizer, english_vocab
from f5kit.vocoder import GriffinLim

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = PRESETS["tiny"].replace(letter_lengths=True)


def test_each_frame_has_the_letter_said_at_its_middle():
    x = torch.arange(1.0, 4)[None, :, None].expand(2, 3, 1)
    x = torch.nn.functional.pad(x, (0, 0, 0, 7))  # three letters and ten frames
    lengths = torch.tensor([[1.0, 3.0, 1.0], [2.0, 2.0, 0.0]])  # the second text has two letters
    lengths = torch.nn.functional.pad(lengths, (0, 7))
    mask = torch.arange(10) < torch.tensor([10, 8])[:, None]
    said = spread_by_length(x, lengths, mask)[..., 0]
    assert said[0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    assert said[1].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0, 0], "nothing is said behind an item's end"


def test_a_letter_without_length_is_passed_over():
    x = torch.arange(1.0, 4)[None, :, None]
    x = torch.nn.functional.pad(x, (0, 0, 0, 1))
    assert spread_by_length(x, torch.tensor([[2.0, 0.0, 2.0, 0.0]]), None)[0, :, 0].tolist() == [1, 1, 3, 3]


def test_equal_lengths_are_an_even_spread():
    x = torch.randn(1, 60, 4)
    x[:, 12:] = 0
    letters = torch.arange(60)[None] < 12
    assert torch.equal(spread_by_length(x, letters.float(), None), spread(x, letters, None))


def test_the_lengths_of_a_text_do_not_depend_on_what_it_is_padded_to():
    text_embed = fresh_model(CONFIG, Tokenizer(english_vocab())).transformer.text_embed
    text = torch.tensor([[40, 41, 42, 43], [44, 45, -1, -1]])
    lengths = text_embed.lengths(text)
    assert (lengths[text >= 0] > 0).all() and (lengths[text < 0] == 0).all()
    assert torch.allclose(lengths[1:, :2], text_embed.lengths(text[1:, :2]), atol=1e-5)


def test_a_voice_takes_its_durations_from_the_model(awake):
    """Where every letter lasts as long as any other, that is the rule by characters; a long letter takes longer."""
    model = awake(fresh_model(CONFIG, Tokenizer(english_vocab())))
    reference = Reference(torch.zeros(24_000), torch.zeros(90, 100), "Nine chars", "a reference")
    voice = Voice(model, reference, GriffinLim())
    with torch.no_grad():
        model.transformer.text_embed.length.weight.zero_()
    assert voice._frames("And twenty characters") == pytest.approx(90 * 21 / 10, rel=1e-4)


def test_lengths_travel_with_the_model_and_stay_out_of_upstream(tmp_path):
    model = fresh_model(CONFIG, Tokenizer(english_vocab()))
    export_model(model, tmp_path / "model", torch.float32)
    again, tokens = load_model(tmp_path / "model"), model.tokenizer.encode("Hello.")
    assert torch.equal(again.letter_lengths(tokens), model.letter_lengths(tokens))
    with pytest.raises(UserError, match="by the lengths of letters, and upstream evenly"):
        require_upstream(CONFIG.replace(mel_mean=0.0, mel_std=1.0))
    with pytest.raises(UserError, match="needs average_upsampling=True"):
        PRESETS["F5TTS_v1_Base"].replace(letter_lengths=True)
    assert fresh_model(PRESETS["tiny"], Tokenizer(english_vocab())).letter_lengths(tokens) is None
