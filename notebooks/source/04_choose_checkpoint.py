# %% [markdown]
# # 04 · Choose a checkpoint
#
# **You get** the base model, the newest checkpoints and points between them side by side, judged by a speech
# recogniser, by speaker similarity and by ear; one choice, written into the run folder for the notebooks after
# this one; and a table of how well the chosen voice says sentences that nobody has judged by yet.
#
# **It takes** some minutes on a GPU, and about four for the demo on two CPU cores.
#
# **You need** a run folder from notebook 02 or 03.

# %% [install]

# %% [markdown]
# ## Parameters
# `run_name` is the run to judge (empty: like the voice). Candidates say `sentences` held-out sentences; the
# chosen one then says `others` more. Leave `choice` empty to take the best by the judge; when your ears
# disagree, put the winner's name there, such as `update_000400 ema`, and run all again. `reference` is the id
# of a clip to speak from, in place of the automatic choice.

# %% [parameters]
workspace = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
run_name = ""  #@param {type:"string"}
reference = ""  #@param {type:"string"}
choice = ""  #@param {type:"string"}
recogniser = "auto"  #@param {type:"string"}
newest = 3  #@param {type:"integer"}
sentences = 8  #@param {type:"integer"}
others = 10  #@param {type:"integer"}
pairs = 3  #@param {type:"integer"}
steps = 32  #@param {type:"integer"}
seed = 0  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# The run and the dataset it was trained on. With fewer than four held-out clips, clips of the training stand
# in, and the figures flatter. The demo has fewer candidates, and fewer sentences, spoken with fewer steps.

# %%
import json
import time
from pathlib import Path

from f5kit import RunFolder, UserError, detect_host, load_dataset
from f5kit.host import workspace_root

started, device = time.time(), detect_host().device
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
run = RunFolder(root / "runs" / (run_name or voice))
dataset = load_dataset(run.dataset_folder)
between = (0.5,) if demo else (0.5, 0.75)
newest, sentences, others, steps, pairs = (1, 3, 10, 8, 2) if demo else (newest, sentences, others, steps, pairs)
recorded = dataset.heldout if len(dataset.heldout) > 3 else dataset.clips
sentences = min(sentences, len(recorded) // 2)

# %% [markdown]
# ## The judge's tools
# A recogniser, an error counter and the weights of a speaker encoder: installed here where they are missing,
# because the other notebooks do without. Resemblyzer comes without the packages it asks for; none is needed.

# %%
import importlib.util
import subprocess
import sys

from f5kit.install import install_missing

print(install_missing(extras=("judge",)))
if not importlib.util.find_spec("resemblyzer"):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "resemblyzer"], check=True)
    importlib.invalidate_caches()

# %% [markdown]
# ## Compare
# Each candidate has the same held-out loss to show and the same sentences to say, with the same noise. What
# differs is the weights: `raw` as trained, `ema` their running average, `ema_050` halfway from the base.

# %%
from f5kit import compare_checkpoints
from f5kit.widgets import table

clips = [(dataset.path(clip), clip.text) for clip in recorded]
trial, fresh = clips[:sentences], clips[sentences : sentences + others]
texts = [text for _, text in trial]
how = {"newest": newest, "between": between, "reference": reference or None, "steps": steps, "seed": seed}
candidates = compare_checkpoints(run, dataset, texts, **how)
folder = root / "sounds" / run.path.name
sounds = [c.speech.save(folder / f"04_{c.name.replace(' ', '_')}.wav") for c in candidates]
table([{"candidate": c.name, "held-out loss": c.loss} for c in candidates])

# %% [markdown]
# ## Judge
# What the recogniser makes of each candidate and of the recordings, how much each sounds like the speaker,
# and the sounds to check both by ear. Listen for dropped words first, for the timbre second.

# %%
from f5kit.judge import judge

systems = {"recordings": [path for path, _ in trial]} | {c.name: c.said for c in candidates}
listening = {"recogniser": recogniser, "device": device, "processes": 2 if demo else 1, "seed": seed}
listening["pool"] = [clip.text for clip in dataset.clips]
verdict = judge(systems, texts, **listening)
verdict

# %% [markdown]
# ## Look
# The first sentence as spectrograms. Clear stacked lines are voiced sounds, grey clouds are hiss; a picture
# without either has not learned to speak yet.

# %%
from f5kit import log_mel, read_audio
from f5kit.widgets import mel_figure

picture = mel_figure({"recorded": log_mel(read_audio(trial[0][0]))} | {c.name: c.speech.mel for c in candidates})
plot = picture.save(root / "plots" / f"candidates_{run.path.name}.png")
picture

# %% [markdown]
# ## A blind comparison
# The two candidates that the judge likes best, in an order you can't see. Vote by the buttons; the names
# appear after the last pair. Nobody has to vote: the choice below does not wait for it.

# %%
from f5kit.widgets import blind_ab

merit = {c.name: verdict.merit(c.name) for c in candidates if c.weights}
rivals = [c for c in candidates if c.name in sorted(merit, key=merit.get)[-2:]]
blind_ab([{c.name: c.said[i] for c in rivals} for i in range(min(pairs, sentences))], seed=seed)

# %% [markdown]
# ## Choose
# One candidate becomes the voice, and notebooks 05 and 06 take it from here on: the one with the highest
# similarity, less its **WER** (word error rate: words that a recogniser hears wrongly, for each word of the
# text) as far as that is above the recordings' own.

# %%
from f5kit import choose_candidate

name = choice or max(merit, key=merit.get)
if name not in merit:
    raise UserError(f"choice is {choice!r}; the candidates are {', '.join(merit)}")
chosen = next(c for c in candidates if c.name == name)
choose_candidate(run, chosen, "chosen by ear" if choice else "best by the judge in notebook 04")
run.best

# %% [markdown]
# ## The voice on other sentences
# The choice was made on some sentences, so it is measured on others: before and after, between recordings and
# controls. Shuffled texts is the voice scored against what it does not say, and must do badly.

# %%
from f5kit import Voice, judge_voice
from f5kit.judge import stranger

clip = dataset.clip(reference) if reference else dataset.typical_clip()
start = {"reference": dataset.path(clip), "reference_text": clip.text}
voices = {"before": Voice.load(run.info["model"], **start), "after": Voice.load(run.path, **start)}
final = judge_voice(voices, fresh, other_reference=stranger(), steps=steps, **listening)
final.save(root / "judged" / run.path.name)
final

# %% [markdown]
# ## Side by side
# The same figures as bars with their intervals, and one of the new sentences as a picture.

# %%
from f5kit.widgets import Picture

bars = Picture(final.figure()).save(root / "plots" / f"judged_{run.path.name}.png")
display(Picture(final.figure()))
after = mel_figure({system: log_mel(heard[0]) for system, heard in final.sounds.items()})
spectrograms = after.save(root / "plots" / f"spoken_{run.path.name}.png")
after

# %% [markdown]
# ## Result
# The figures behind the choice and of the chosen voice, in a file. All sounds and every sentence's figures
# lie beside it in the folder `judged`.

# %%
result = {"notebook": "<<name>>", "seconds": round(time.time() - started, 1)}
result |= {"run": str(run.path), "losses": {c.name: c.loss for c in candidates}, "chosen": run.best}
result |= {"merit": merit, "trial": verdict.summary, "judged": final.summary, "about": final.about}
result |= {"sounds": [str(path) for path in sounds], "plots": [str(p) for p in (plot, bars, spectrograms)]}
result["sounds"] += sorted(map(str, (root / "judged" / run.path.name / "sounds").glob("*.wav")))
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
