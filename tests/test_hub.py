"""f5kit.hub and f5kit.card: a run is exported, pushed to a Hub on this machine, fetched again and heard."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest
import torch
import yaml
from hub_server import serve

from f5kit.card import check_licence, find_base, model_card
from f5kit.checkpoint import WEIGHTS, RunFolder, load_model
from f5kit.errors import UserError
from f5kit.host import detect_host
from f5kit.hub import build_export, publish, verify_export
from f5kit.inference import Voice
from f5kit.plan import plan_run
from f5kit.trainer import Trainer
from f5kit.weights import read_tensors

TOKEN = "hf_" + "canaryToken" * 3
CARD = {"language": "en", "consent": "The demo voice is synthetic; there is no speaker to ask."}
TEXT = "Hello there."
NAMES = {"model.safetensors", "config.json", "vocab.txt", "reference.wav", "reference.txt"}
NAMES |= {"export.json", "README.md"}


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """Two real updates of the tiny model."""
    plan = plan_run("tiny", dataset, detect_host("cpu"), updates=2, update_frames=600, micro_frames=600)
    return Trainer(plan, dataset, tmp_path_factory.mktemp("runs") / "my_voice").fit()


@pytest.fixture(scope="module")
def voice(run):
    return Voice.load(run.path, vocoder="griffin-lim", device="cpu")


@pytest.fixture(scope="module")
def speech(voice):
    return voice.speak(TEXT, steps=2, progress=False)


@pytest.fixture(scope="module")
def export(run, speech, tmp_path_factory):
    return build_export(run, tmp_path_factory.mktemp("exports") / "voice", samples=[speech], **CARD)


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    """Nobody is logged in, and files go by plain HTTP (Xet speaks to servers of its own)."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch):
    with serve(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)  # for the process that pushes
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for place in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
            monkeypatch.setattr(place, server.endpoint, raising=False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- the export


def test_an_export_holds_what_it_should(export, run):
    assert contents(export).keys() == NAMES | {"samples/01.wav"}
    stored = read_tensors(export / "model.safetensors")
    best = read_tensors(run.checkpoint().path / WEIGHTS[run.best["weights"]])
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor.float(), best[name], atol=1e-3, rtol=1e-3)
    assert sum(t.dtype == torch.float16 for t in stored.values()) > len(stored) / 2


def test_no_path_of_this_machine_is_exported(export, run, dataset):
    for name, data in contents(export).items():
        for path in (str(run.path.parent), str(dataset.folder), str(export.parent)):
            assert path.encode() not in data, name


def test_exporting_again_replaces_it_whole(run, tmp_path):
    folder = build_export(run, tmp_path / "voice", **CARD)
    (folder / "stale.txt").write_text("from an earlier export")
    build_export(run, folder, weights="ema", precision="fp32", **CARD)
    assert contents(folder).keys() == NAMES
    assert [p.name for p in tmp_path.iterdir()] == ["voice"]
    ema = read_tensors(run.checkpoint().path / "ema.safetensors")
    stored = read_tensors(folder / "model.safetensors")
    assert all(torch.equal(stored[name], ema[name]) for name in stored)


def test_a_failing_export_leaves_nothing(run, tmp_path):
    with pytest.raises(UserError):
        build_export(run, tmp_path / "voice", samples=[tmp_path / "missing.wav"], **CARD)
    assert not list(tmp_path.iterdir())


def test_what_is_no_export_is_not_replaced(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is no export"):
        build_export(run, tmp_path, **CARD)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"consent": "  "}, "consent is empty"), ({"precision": "int4"}, "precision is 'int4'; choose one of")],
)
def test_what_can_be_mended_is_said(run, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        build_export(run, tmp_path / "voice", **{**CARD, **changes})


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    file = copy.checkpoint().path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="model.safetensors does not match its sha256"):
        build_export(copy, tmp_path / "voice", **CARD)


# ---- the card


def parts_of(card: str):
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()
    return yaml.safe_load(front), body


def test_the_card_states_the_runs_own_figures(export, run, dataset):
    front, body = parts_of((export / "README.md").read_text(encoding="utf-8"))
    assert front["license"] == "mit" and front["language"] == ["en"]
    assert front["pipeline_tag"] == "text-to-speech" and "base_model" not in front
    state = run.checkpoint().state
    assert f"{state['loss_' + run.best['weights']]:.4f}" in body
    (first,) = [e["loss_raw"] for e in run.events() if e["event"] == "evaluate" and e["update"] == 0]
    assert f"before training {first:.4f}" in body
    assert f"| updates | {state['update']} (fp32, " in body
    minutes = sum(clip.seconds for clip in dataset.train) / 60
    assert f"{minutes:.1f} minutes in {len(dataset.train)} clips" in body
    parameters = sum(p.numel() for p in load_model(run.path).parameters())
    assert f"{parameters:,}, stored in fp16" in body
    assert CARD["consent"] in body and "commercial" not in body and "$" not in body
    for link in re.findall(r"\]\((?!http)([^)]+)\)", body):
        assert (export / link).is_file(), link


def test_figures_that_are_not_known_are_left_out(run, dataset, tmp_path):
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    info = copy.info | {"dataset": str(tmp_path / "moved")}
    (copy.path / "run.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="no prepared dataset"):
        build_export(copy, tmp_path / "voice", **CARD)
    clip = dataset.train[0]
    folder = build_export(copy, tmp_path / "voice", reference=(dataset.path(clip), clip.text), **CARD)
    body = (folder / "README.md").read_text(encoding="utf-8")
    assert "| updates | 2 " in body and "minutes" not in body and "loss" not in body


def test_how_to_load_is_so(export, monkeypatch):
    """The code of the card, run as it stands but for the sound's name and the number of steps."""
    card = (export / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    code = code.replace("path/to/these/files", str(export))
    original = Voice.speak
    monkeypatch.setattr(Voice, "speak", lambda self, text: original(self, text, steps=1, progress=False))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(export.parent)
    exec(code, {})  # noqa: S102
    assert (export.parent / "speech.wav").stat().st_size > 1000


def test_the_licence_is_inherited(tmp_path):
    base = find_base("F5TTS_v1_Base")
    expected = {"base": "F5TTS_v1_Base", "base_repository": "SWivid/F5-TTS", "base_licence": "cc-by-nc-4.0"}
    assert base == expected
    assert check_licence("F5TTS_v1_Base", "cc-by-nc-4.0", None) == "cc-by-nc-4.0"
    assert check_licence("F5TTS_v1_Base", "cc-by-nc-4.0", "cc-by-nc-sa-4.0") == "cc-by-nc-sa-4.0"
    with pytest.raises(UserError, match="licence is 'mit', but F5TTS_v1_Base hands cc-by-nc-4.0 down"):
        check_licence("F5TTS_v1_Base", "cc-by-nc-4.0", "mit")
    assert find_base("tiny")["base_licence"] == find_base("starter")["base_licence"] == "mit"
    (tmp_path / "somebody").mkdir()
    assert find_base(str(tmp_path / "somebody"))["base_licence"] is None
    with pytest.raises(UserError, match="licence of somebody is not known"):
        check_licence("somebody", None, None)


def test_a_run_that_started_from_a_run_inherits_from_its_base(run, export):
    for start in (run.path, run.checkpoint().path, export):
        assert find_base(str(start)) == {"base": "tiny", "base_repository": None, "base_licence": "mit"}


def test_the_card_of_a_finetuned_base_names_it(export):
    facts = json.loads((export / "export.json").read_text()) | find_base("F5TTS_v1_Base")
    front, body = parts_of(model_card({**facts, "licence": "cc-by-nc-4.0"}, "you/voice"))
    assert front["base_model"] == "SWivid/F5-TTS" and front["license"] == "cc-by-nc-4.0"
    assert "finetuned from F5TTS_v1_Base" in body and "cc-by-nc-4.0, forbids commercial use" in body
    assert 'Voice.load("you/voice")' in body


# ---- publishing


def test_nothing_is_pushed_unless_asked(run, hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = publish(run, "you/voice", card=CARD, folder=tmp_path / "voice")
    assert result.dry_run and result.url is None and result.files.keys() == NAMES
    assert result.files["model.safetensors"] == (tmp_path / "voice" / "model.safetensors").stat().st_size
    assert "dry run" in str(result) and not hub.requests


def test_without_a_token_nothing_is_pushed(export, hub):
    result = publish(export, "you/voice", dry_run=False)
    assert result.dry_run and "no HF_TOKEN was found" in str(result) and not hub.requests


def test_a_push_is_private_whole_and_can_be_fetched(export, hub, voice, monkeypatch, tmp_path):
    folder = shutil.copytree(export, tmp_path / "voice")
    (folder / ".env").write_text("API_KEY=private")
    (folder / "notes.wav").write_text("not of the export")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = publish(folder, "you/voice", dry_run=False)
    assert result.url == f"{hub.endpoint}/you/voice" and not result.dry_run
    repository = hub.repositories["you/voice"]
    assert repository.private
    assert repository.files.keys() == NAMES | {"samples/01.wav"} == result.files.keys()
    for name, data in repository.files.items():
        assert hashlib.sha256(data).digest() == hashlib.sha256((folder / name).read_bytes()).digest()
    assert b'Voice.load("you/voice")' in repository.files["README.md"]

    again = publish(folder, "you/voice", dry_run=False)  # a cell that is run again
    assert again.url == result.url

    heard = verify_export("you/voice", TEXT, voice, steps=2)
    assert heard.ok and heard.distance < 0.05, heard


def test_a_push_in_the_background_replaces_what_is_out_of_date(export, hub, tmp_path):
    folder = shutil.copytree(export, tmp_path / "voice")
    publish(folder, "you/voice", token=TOKEN, dry_run=False)
    (folder / "samples" / "01.wav").rename(folder / "samples" / "02.wav")
    result = publish(folder, "you/voice", token=TOKEN, dry_run=False, background=True)
    assert "on its way to you/voice" in str(result) and result.url is None
    assert result.push.wait() == f"{hub.endpoint}/you/voice" and result.push.done
    assert hub.repositories["you/voice"].files.keys() == NAMES | {"samples/02.wav"}
    revisions = [files.keys() for _, files in hub.repositories["you/voice"].revisions]
    assert revisions == [set(), NAMES | {"samples/01.wav"}, NAMES | {"samples/02.wav"}]  # none between


def test_what_the_judge_found_is_on_the_card(run, tmp_path):
    figure = {"value": 0.125, "low": 0.1, "high": 0.15, "sentences": 7}
    summary = {"after": {"wer": figure, "similarity": None}, "recordings": {"wer": {**figure, "value": 0.05}}}
    (tmp_path / "report.json").write_text(json.dumps({"summary": summary, "about": {"recogniser": "whisper-tiny"}}))
    folder = build_export(run, tmp_path / "voice", judged=tmp_path, **CARD)
    body = (folder / "README.md").read_text(encoding="utf-8")
    assert "| word errors per word | 0.12 (0.10 to 0.15), 7 sentences; by whisper-tiny, which has 0.05 on" in body
    assert "likeness" not in body
    with pytest.raises(UserError, match="holds no report.json of the judge"):
        build_export(run, tmp_path / "voice", judged=tmp_path / "nowhere", **CARD)


def test_what_upstream_can_hold_is_said(export):
    facts = json.loads((export / "export.json").read_text())
    assert "tiny reads mels scaled by mean -2" in facts["upstream_obstacle"]
    assert "Upstream's code can't: tiny reads mels" in (export / "README.md").read_text(encoding="utf-8")
    card = model_card({**facts, "upstream_obstacle": None}, "you/voice")
    assert "f5-tts_infer-cli --model_cfg voice/model.yaml --ckpt_file voice/model.safetensors" in card
    assert "hf download you/voice --local-dir voice" in card


def test_an_edited_card_is_left_as_it_is(export, tmp_path):
    folder = shutil.copytree(export, tmp_path / "voice")
    (folder / "README.md").write_text("my own words")
    publish(folder, "you/voice")
    assert (folder / "README.md").read_text() == "my own words"


def test_a_private_voice_does_not_go_into_a_public_repository(export, hub, tmp_path):
    publish(shutil.copytree(export, tmp_path / "a"), "you/open", token=TOKEN, private=False, dry_run=False)
    assert not hub.repositories["you/open"].private
    before = dict(hub.repositories["you/open"].files)
    (tmp_path / "a" / "reference.txt").write_text("another text")
    with pytest.raises(UserError, match="you/open is public: make it private"):
        publish(tmp_path / "a", "you/open", token=TOKEN, dry_run=False)
    assert hub.repositories["you/open"].files == before


@pytest.mark.parametrize(
    ("part", "status"), [("/repos/create", 403), ("/commit/", 413), ("/preupload/", 403)]
)
def test_a_refusal_is_one_sentence(export, hub, part, status):
    hub.refuse[part] = status
    with pytest.raises(UserError, match=rf"did not take you/voice \(.*{status}\).*run this again") as told:
        publish(export, "you/voice", token=TOKEN, dry_run=False)
    assert ("give a token that may do this" in str(told.value)) == (status == 403)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"repo_id": None, "dry_run": False}, "repo_id is None: name the repository"),
        ({"repo_id": "voice", "dry_run": False}, "repo_id is 'voice': name the repository"),
        ({"repo_id": "you/voice", "card": CARD}, "has its card already"),
    ],
)
def test_publishing_says_what_it_needs(export, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        publish(export, **arguments)


def test_a_card_without_consent_is_refused(run):
    with pytest.raises(UserError, match=r"it needs \['language'\]"):
        publish(run, card={"consent": "Public domain"})
    with pytest.raises(UserError, match="consent is empty"):
        publish(run, card={"language": "en"})


def test_the_token_is_nowhere(run, hub, monkeypatch, tmp_path, capfd, caplog):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = publish(run, "you/voice", card=CARD, folder=tmp_path / "voice", dry_run=False)
    hub.refuse["/preupload/"] = 401
    with pytest.raises(UserError) as told:
        publish(run, "you/voice", card=CARD, folder=tmp_path / "voice", token=TOKEN, dry_run=False)
    shown = repr(result) + str(result) + str(told.value) + "".join(capfd.readouterr()) + caplog.text
    assert TOKEN not in shown
    for folder in (tmp_path, run.path):
        assert not [name for name, data in contents(folder).items() if TOKEN.encode() in data]
    assert not [n for n, data in hub.repositories["you/voice"].files.items() if TOKEN.encode() in data]


# ---- verifying


def test_verify_hears_the_same_voice(export, voice):
    heard = verify_export(export, TEXT, voice, steps=2)
    assert heard.ok and heard.distance < 0.05 and str(heard).startswith("passed")
    assert verify_export(export, TEXT, steps=1).ok


def test_verify_hears_another_voice(export, voice, tmp_path, awake):
    other = Voice(awake(load_model("tiny"), seed=5), voice.reference, voice.vocoder, pace=voice.pace)
    heard = verify_export(export, TEXT, other, steps=2)
    assert not heard.ok and heard.distance > 0.1 and str(heard).startswith("FAILED")
    folder = shutil.copytree(export, tmp_path / "voice")
    (folder / "reference.txt").write_text("Too short a text.")
    heard = verify_export(folder, TEXT, voice, steps=1)
    assert not heard.ok and "the references differ" in str(heard)


def test_verify_hears_silence(export, voice, tmp_path, monkeypatch):
    monkeypatch.setattr(type(voice.vocoder), "decode", lambda self, mel: torch.zeros((len(mel) - 1) * 256))
    heard = verify_export(export, TEXT, voice, steps=1)
    assert not heard.ok and "is silent" in str(heard)


def test_verify_of_what_is_not_there(hub):
    with pytest.raises(UserError, match="there is no export nowhere"):
        verify_export("nowhere", TEXT)
    with pytest.raises(UserError, match="the Hub did not give you/nothing"):
        verify_export("you/nothing", TEXT, token=TOKEN)
