"""The model card of an export: what the run's own files tell, the licence it inherits, and the text."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from string import Template

from f5kit.checkpoint import OWN_PRESETS
from f5kit.config import ModelConfig
from f5kit.convert import require_upstream
from f5kit.data import load_dataset
from f5kit.errors import UserError
from f5kit.repository import card_facts, fetch_model, repository_name
from f5kit.runs import RunFolder, dataset_facts
from f5kit.weights import PUBLISHED

PUBLISHED_LICENCE = "cc-by-nc-4.0"  # of upstream's weights (F5-TTS, README); its code is MIT
OWN_LICENCE = "mit"  # of the kit's own presets


def find_base(model: str) -> dict:
    """{"base", "base_repository", "base_licence"} of what a run started from; None for what is not known."""
    if repository_name(model) and model not in PUBLISHED:
        folder = fetch_model(model).folder
        told = find_base(str(folder)) if (folder / "export.json").is_file() else {}
        licence = told.get("base_licence") or card_facts(folder).get("license")
        repository = told.get("base_repository") or repository_name(model)[0]
        return {"base": told.get("base", model), "base_repository": repository, "base_licence": licence}
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
    kept = checkpoint.path / "data.json"
    told = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else dataset_facts(run.path)
    facts |= {"consent": told["consent"]} if told.get("consent") else {}
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
    noncommercial = facts["licence"].startswith("cc-by-nc")
    template = Path(__file__).parent / "assets" / "model_card.md"
    return Template(template.read_text(encoding="utf-8")).substitute(
        front_matter=yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(),
        name=facts["name"],
        origin=f"{'finetuned from' if facts['base_repository'] else 'started as'} {facts['base']}",
        kit=_kit(),
        figures="\n".join(f"| {name} | {value} |" for name, value in _figures(facts).items()),
        sounds="\n".join(sounds),
        place=repo_id or "path/to/these/files",
        words=json.dumps(facts["reference"], ensure_ascii=False),
        upstream=_upstream(facts, repo_id),
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
    for measure, name in (("wer", "word errors per word"), ("similarity", "likeness to the speaker")):
        if figure := facts.get("judged", {}).get(measure):
            rows[name] = figure
    if facts.get("held_out_clips"):
        before = f" (before training {facts['first_loss']:.4f})" if "first_loss" in facts else ""
        rows["flow-matching loss on clips it was not trained on"] = f"{facts['loss']:.4f}{before}"
    return rows


def judged_figures(report: str | Path, system: str = "after") -> dict[str, str]:
    """{"wer", "similarity"} as the judge's report has them, each with its interval and what it is measured by.

    Raises UserError when the folder holds no report, or one without that system.
    """
    file = Path(report) / "report.json"
    if not file.is_file():
        raise UserError(f"{report} holds no report.json of the judge: run notebook 04, or leave `judged` out")
    told = json.loads(file.read_text(encoding="utf-8"))
    if system not in told["summary"]:
        raise UserError(f"{file} has no {system!r}; it has {', '.join(told['summary'])}")
    mine, recorded = told["summary"][system], told["summary"].get("recordings", {})
    figures = {}
    for measure in ("wer", "similarity"):
        if not mine.get(measure):
            continue
        spread = "{value:.2f} ({low:.2f} to {high:.2f})".format(**mine[measure])
        beside = recorded.get(measure)
        scale = "0 is another speaker, 1 the speaker's recordings"
        if measure == "wer":
            scale = f"by {told['about'].get('recogniser', 'the judge')}"
            scale += f", which has {beside['value']:.2f} on the speaker's recordings" if beside else ""
        figures[measure] = f"{spread}, {mine[measure]['sentences']} sentences; {scale}"
    return figures


def upstream_obstacle(config: ModelConfig) -> str | None:
    """Why upstream's code cannot hold a model of this config; None when it can."""
    try:
        require_upstream(config)
    except UserError as error:
        return str(error).partition(":")[0]
    return None


def _upstream(facts: dict, repo_id: str | None) -> str:
    """How upstream's own code speaks with these files."""
    if facts.get("upstream_obstacle"):
        return f"Upstream's code can't: {facts['upstream_obstacle']}."
    words = json.dumps(facts["reference"], ensure_ascii=False).replace("$", "\\$").replace("`", "\\`")
    lines = [f"hf download {repo_id} --local-dir voice"] if repo_id else ["cd path/to && ln -s these/files voice"]
    lines += ["f5-tts_infer-cli --model_cfg voice/model.yaml --ckpt_file voice/model.safetensors \\"]
    lines += ["  --vocab_file voice/vocab.txt --ref_audio voice/reference.wav \\"]
    lines += [f"  --ref_text {words} --gen_text {words}"]
    return "\n".join(["```console", *lines, "```"])


def _kit() -> str:
    """f5kit with its address, where the installed package tells it."""
    try:
        urls = metadata.metadata("f5kit").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    address = [url.removeprefix("Repository, ") for url in urls if url.startswith("Repository, ")]
    return f"[f5kit]({address[0]})" if address else "f5kit"
