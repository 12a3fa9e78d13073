"""The model card of an export: what the run's own files tell, the licence it inherits, and the text."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from string import Template

from f5kit.checkpoint import OWN_PRESETS, RunFolder
from f5kit.data import load_dataset
from f5kit.errors import UserError
from f5kit.weights import PUBLISHED

PUBLISHED_LICENCE = "cc-by-nc-4.0"  # of upstream's weights (F5-TTS, README); its code is MIT
OWN_LICENCE = "mit"  # of the kit's own presets


def find_base(model: str) -> dict:
    """{"base", "base_repository", "base_licence"} of what a run started from; None for what is not known."""
    folder = Path(model)
    if (folder / "export.json").is_file():
        facts = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        known = {"base": facts["base"], "base_repository": facts["base_repository"]}
        return {**known, "base_licence": facts["licence"]}
    if (folder / "extended.json").is_file():  # another vocabulary, the same weights
        return find_base(json.loads((folder / "extended.json").read_text(encoding="utf-8"))["base"])
    for around in (folder, folder.parent.parent):  # a run, or a checkpoint in one
        if folder.is_dir() and (around / "run.json").is_file():
            return find_base(RunFolder(around).info["model"])
    if folder.exists():
        return {"base": folder.stem, "base_repository": None, "base_licence": None}
    licence = OWN_LICENCE if model in OWN_PRESETS else PUBLISHED_LICENCE if model in PUBLISHED else None
    return {"base": model, "base_repository": PUBLISHED.get(model, [None])[0], "base_licence": licence}


def check_licence(base: str, inherited: str | None, asked: str | None) -> str:
    """The licence of an export. UserError when there is none, or the base forbids the one asked for."""
    if not (asked or inherited):
        raise UserError(f"the licence of {base} is not known: say it, as in licence='cc-by-nc-4.0'")
    if asked and (inherited or "").startswith("cc-by-nc") and not asked.startswith("cc-by-nc"):
        raise UserError(f"licence is {asked!r}, but {base} hands {inherited} down: leave the licence out")
    return asked or inherited


def run_figures(run: RunFolder, weights: str) -> dict:
    """What the run's own files tell; what they do not tell is left out."""
    info, checkpoint = run.info, run.checkpoint()
    damage = checkpoint.damage()
    if damage:
        raise UserError(f"{checkpoint.path} is damaged ({damage}): choose another checkpoint with run.choose")
    state, plan = checkpoint.state, info["plan"]
    facts = {"format": 1, "name": run.path.name, **find_base(info["model"]), "checkpoint": checkpoint.name}
    facts |= {"weights": weights, "updates": state["update"]}
    facts["loss"] = state.get(f"loss_{weights}", (run.best or {}).get("loss"))  # of points between, best.json has it
    facts |= {"device": plan["device_name"], "trained_in": plan["train"]["precision"]}
    for event in run.events():
        if event["event"] == "evaluate" and event["update"] == 0:
            facts["first_loss"] = event["loss_raw"]
    try:
        dataset = load_dataset(run.dataset_folder)
    except UserError:
        return facts
    if dataset.manifest_hash == info["manifest_hash"]:  # else it is no longer what the run was trained on
        minutes = round(sum(clip.seconds for clip in dataset.train) / 60, 1)
        facts |= {"minutes": minutes, "clips": len(dataset.train), "held_out_clips": len(dataset.heldout)}
    return facts


def model_card(facts: dict, repo_id: str | None = None) -> str:
    """README.md of an export, from the facts of its export.json: no other figure than the run's own."""
    import yaml

    head = {"language": facts["language"], "license": facts["licence"], "pipeline_tag": "text-to-speech"}
    head["tags"] = ["f5kit", "f5-tts", "text-to-speech", "flow-matching"]
    if facts["base_repository"]:
        head |= {"base_model": facts["base_repository"], "base_model_relation": "finetune"}
    sounds = ["- [reference.wav](reference.wav): the recording it continues"]
    for sample in facts["samples"]:
        said = f": “{sample['text']}” (seed {sample['seed']})" if "text" in sample else ""
        sounds.append(f"- [{sample['file']}]({sample['file']}){said}")
    find = f'from huggingface_hub import snapshot_download\n\nfolder = snapshot_download("{repo_id}")'
    noncommercial = facts["licence"].startswith("cc-by-nc")
    template = Path(__file__).parent / "assets" / "model_card.md"
    return Template(template.read_text(encoding="utf-8")).substitute(
        front_matter=yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(),
        name=facts["name"],
        origin=f"{'finetuned from' if facts['base_repository'] else 'started as'} {facts['base']}",
        kit=_kit(),
        figures="\n".join(f"| {name} | {value} |" for name, value in _figures(facts).items()),
        sounds="\n".join(sounds),
        find=find if repo_id else 'folder = "path/to/these/files"',
        words=json.dumps(facts["reference"], ensure_ascii=False),
        consent=facts["consent"],
        terms=f"Its licence, {facts['licence']}, forbids commercial use." if noncommercial else "",
    )


def _figures(facts: dict) -> dict[str, str]:
    rows = {"parameters": f"{facts['parameters']:,}, stored in {facts['precision']}"}
    rows["updates"] = f"{facts['updates']:,} ({facts['trained_in']}, {facts['device']})"
    kinds = {"ema": "running average (EMA)", "raw": "as trained (raw)"}
    share = facts["weights"].rpartition("_")[2].lstrip("0")
    rows["weights"] = kinds.get(facts["weights"], f"{share} % of the way from the base to the running average (EMA)")
    if "minutes" in facts:
        rows["speech it was trained on"] = f"{facts['minutes']} minutes in {facts['clips']} clips"
    if facts.get("held_out_clips"):
        before = f" (before training {facts['first_loss']:.4f})" if "first_loss" in facts else ""
        rows["flow-matching loss on clips it was not trained on"] = f"{facts['loss']:.4f}{before}"
    return rows


def _kit() -> str:
    """f5kit with its address, where the installed package tells it."""
    try:
        urls = metadata.metadata("f5kit").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    address = [url.removeprefix("Repository, ") for url in urls if url.startswith("Repository, ")]
    return f"[f5kit]({address[0]})" if address else "f5kit"
