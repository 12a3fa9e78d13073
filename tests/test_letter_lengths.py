"""A text spread over its frames by how long each letter lasts: aligned where the mel is known, expected elsewhere."""

from itertools import combinations

import pytest
import torch

from f5kit import load_model
from f5kit.alignment import monotonic_lengths
from f5kit.cfm import draw
from f5kit.checkpoint import export_model, fresh_model
from f5kit.config import PRESETS
from f5kit.convert import require_upstream
from f5kit.data import collate
from f5kit.errors import UserError
from f5kit.inference import Reference, Voice
from f5kit.layers import spread, spread_by_length
from f5kit.text import Tokenizer, english_vocab
from f5kit.vocoder import GriffinLim

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = PRESETS["tiny"].replace(letter_lengths=True)


def test_each_frame_has_the_letter_said_at_its_middle():
    x = torch.arange(1.0, 4)[None, :, None].expand(2, 3, 1)
    lengths = torch.tensor([[1.0, 3.0, 1.0], [2.0, 2.0, 0.0]])  # the second text has two letters
    mask = torch.arange(10) < torch.tensor([10, 8])[:, None]
    said = spread_by_length(x, lengths, mask)[..., 0]
    assert said[0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    assert said[1].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0, 0], "nothing is said behind an item's end"


def test_a_letter_without_length_is_passed_over():
    x = torch.arange(1.0, 4)[None, :, None]
    own = torch.ones(1, 4, dtype=torch.bool)
    assert spread_by_length(x, torch.tensor([[2.0, 0.0, 2.0]]), own)[0, :, 0].tolist() == [1, 1, 3, 3]


def test_equal_lengths_are_an_even_spread():
    x = torch.randn(1, 60, 4)
    x[:, 12:] = 0
    letters, own = torch.arange(60)[None] < 12, torch.ones(1, 60, dtype=torch.bool)
    assert torch.equal(spread_by_length(x, letters.float(), own), spread(x, letters, None))


def test_the_lengths_of_a_text_do_not_depend_on_what_it_is_padded_to():
    text_embed = fresh_model(CONFIG, Tokenizer(english_vocab())).transformer.text_embed
    text = torch.tensor([[40, 41, 42, 43], [44, 45, -1, -1]])
    lengths = text_embed.lengths(text)
    assert (lengths[text >= 0] > 0).all() and (lengths[text < 0] == 0).all()
    assert torch.allclose(lengths[1:, :2], text_embed.lengths(text[1:, :2]), atol=1e-5)


def best_of_all(score):
    """The lengths with the highest score, by trying every way to cut the frames into letters."""
    nt, n = score.shape
    ways = ((0, *cuts, n) for cuts in combinations(range(1, n), nt - 1))
    best = max(ways, key=lambda way: sum(score[i, way[i] : way[i + 1]].sum() for i in range(nt)))
    return torch.tensor(best).diff().float()


def test_the_search_finds_the_best_of_all_alignments():
    g = torch.Generator().manual_seed(0)
    score, letters, frames = torch.randn(6, 5, 11, generator=g), [5, 3, 1, 5, 4, 2], [11, 9, 11, 5, 10, 2]
    found = monotonic_lengths(score, torch.tensor(letters), torch.tensor(frames))
    for i, (nt, n) in enumerate(zip(letters, frames, strict=True)):
        assert torch.equal(found[i, :nt], best_of_all(score[i, :nt, :n])) and not found[i, nt:].any()


def test_more_letters_than_frames_share_them_evenly():
    found = monotonic_lengths(torch.zeros(1, 8, 4), torch.tensor([8]), torch.tensor([4]))
    assert found.tolist() == [[0.5] * 8]


@pytest.fixture
def speller():
    """A model whose letters have a sound of their own, and a clip in which they last 3, 9, 2 and 6 frames."""
    model = fresh_model(CONFIG, Tokenizer(english_vocab()))
    embed, lengths = model.transformer.text_embed, torch.tensor([3.0, 9, 2, 6])
    tokens = model.tokenizer.encode("spit")
    with torch.no_grad():
        letters, _ = embed._letters(torch.tensor([tokens]), 4, None, None)
        mel = model.unscale(spread_by_length(embed.sound(letters), lengths[None], torch.ones(1, 20, dtype=torch.bool)))
    return model, tokens, mel[0], lengths


def test_letters_last_as_they_do_in_a_known_mel(speller):
    model, tokens, mel, lengths = speller
    sound = model.transformer.text_embed.sound
    with torch.no_grad():  # what is heard is relative to the clip's mean
        sound.bias -= model.scale(mel).mean(0)
    assert model.letter_lengths(tokens, mel, 4).tolist() == lengths.tolist()
    longer = model.tokenizer.encode("spit it")
    later = model.letter_lengths(longer, mel, 4)[4:]
    expected = model.letter_lengths(longer)
    assert torch.allclose(later / later.sum(), expected[4:] / expected[4:].sum())
    assert later.sum() / expected[4:].sum() == pytest.approx(20 / float(expected[:4].sum()))


def test_the_loss_asks_for_lengths_in_training_alone_and_an_item_in_a_batch_as_alone(speller):
    model, tokens, mel, lengths = speller
    noise = torch.randn(30, 100, generator=torch.Generator().manual_seed(1))
    batch = collate([mel, noise], [tokens, model.tokenizer.encode("of it")], ["a", "b"], 0, [0, 1])
    draws = draw(batch, 0)
    together, alone = model.train()(batch, draws), []
    for i, n in enumerate((20, 30)):
        one = collate([batch.mel[i, :n]], [batch.text[i][batch.text[i] >= 0].tolist()], ["c"], 0, [i])
        alone.append(model(one, draw(one, 0)))
    assert together.item() == pytest.approx(sum(alone).item(), rel=1e-5)
    text_embed, judged = model.transformer.text_embed, model.eval()(batch, draws)
    assert judged < together
    model.train()(batch, draws).backward()
    assert text_embed.length.weight.grad.abs().sum() > 0 and text_embed.sound.weight.grad.abs().sum() > 0
    known = torch.full((2, len('of it')), -1.0)
    known[0, :4] = lengths
    told, _ = text_embed.align(batch.text, model.scale(batch.mel), batch.mask, known)
    assert told[0, :4].tolist() == lengths.tolist() and told[1, :5].sum() == 30


def test_a_voice_takes_its_durations_from_the_model(awake):
    """Where every letter is expected to last as long as any other, that is the rule by characters."""
    model = awake(fresh_model(CONFIG, Tokenizer(english_vocab())))
    reference = Reference(torch.zeros(24_000), torch.zeros(90, 100), "Nine chars", "a reference")
    voice = Voice(model, reference, GriffinLim())
    with torch.no_grad():
        model.transformer.text_embed.length.weight.zero_()
    assert voice._frames("And twenty characters") == pytest.approx(90 * 21 / 11, rel=1e-4)  # a space lies between
    lengths = voice._spread("And twenty characters", 60)
    assert len(lengths) == 32 and lengths[:11].sum() == 90
    assert torch.allclose(lengths[11:], torch.tensor(60 / 21))


def test_lengths_travel_with_the_model_and_stay_out_of_upstream(tmp_path):
    model = fresh_model(CONFIG, Tokenizer(english_vocab()))
    export_model(model, tmp_path / "model", torch.float32)
    again, tokens = load_model(tmp_path / "model"), model.tokenizer.encode("Hello.")
    weights = again.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    # what is computed from them, not to the last bit: where they lie in memory decides which instructions are taken
    torch.testing.assert_close(again.letter_lengths(tokens), model.letter_lengths(tokens))
    with pytest.raises(UserError, match="by the lengths of letters, and upstream evenly"):
        require_upstream(CONFIG.replace(mel_mean=0.0, mel_std=1.0))
    with pytest.raises(UserError, match="needs average_upsampling=True"):
        PRESETS["F5TTS_v1_Base"].replace(letter_lengths=True)
    assert fresh_model(PRESETS["tiny"], Tokenizer(english_vocab())).letter_lengths(tokens) is None
