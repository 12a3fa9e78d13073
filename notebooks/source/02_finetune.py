# %% [markdown]
# # <<number>> · <<title>>
#
# **You get** a finetuned voice in a run folder, its loss curve, and the same sentence spoken before, during
# and after.
#
# **It takes** what the plan below says before anything starts; stopped half-way, *Run all* goes on where it
# was.
#
# **You need** the dataset of notebook 01 and <<machine>>. The plan makes use of <<ways>> when it finds that
# machine, and of whatever else it finds otherwise.

# %% [install]

# %% [markdown]
# ## Parameters
# Leave `minutes` and `updates` at 0 and the plan derives them from how much voice there is; 0 as learning
# rate is its choice too. `run_name` names the run folder (empty: like the voice). Two runs compare well
# when all but one value agree. `max_minutes` is what the host allows: the run is saved before that, and goes
# on when you start it again. A run that goes on keeps its settings; with `change_run` it takes new ones.
# `backup` names where copies of the run go while it trains, and where a new session finds them: Google Drive,
# a private repository of the Hub, or a folder (on Kaggle the output of a saved version stays by itself).

# %% [parameters]
workspace = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
run_name = ""  #@param {type:"string"}
base_model = "F5TTS_v1_Base"  #@param {type:"string"}
minutes = 0.0  #@param {type:"number"}
updates = 0  #@param {type:"integer"}
learning_rate = 0.0  #@param {type:"number"}
optimizer = "auto"  #@param ["auto", "adamw", "adamw8bit", "paged_adamw8bit"]
precision = "auto"  #@param ["auto", "fp32", "bf16", "fp16"]
max_minutes = 0.0  #@param {type:"number"}
change_run = False  #@param {type:"boolean"}
seed = 0  #@param {type:"integer"}
wandb = False  #@param {type:"boolean"}
backup = ""  #@param ["", "drive", "hub:you/my-runs"] {allow-input: true}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# The demo finetunes the kit's small `starter` voice to another speaker, for about four minutes on two
# processor cores: enough to see every part at work, and to hear the voice change.

# %%
import json
import time
from pathlib import Path

from f5kit.backup import restore_workspace
from f5kit.host import workspace_root

started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
restore_workspace(root)  # on Kaggle: the output of an earlier version, added as an input
run_name = run_name or voice
if demo:
    base_model, updates = "starter", updates or 150

# %% [markdown]
# ## The machine and the data
# The device and the precision it is good for, and the dataset that notebook 01 left in the workspace. If
# notebook 01 added letters to this base model, the run starts from the model that has them.

# %%
from f5kit import detect_host, load_dataset
from f5kit.vocab import find_extended

host = detect_host()
dataset = load_dataset(root / "data" / voice)
base_model = find_extended(base_model, root / "models" / f"{voice}_base")
print(host, dataset, f"starting from {base_model}", sep="\n")

# %% [markdown]
# ## The plan
# What the run will do and cost, with a reason for every choice: the fastest way of training that fits this
# device. Memory is counted before anything is computed, and on a GPU a real update with the longest clips
# corrects it. When the row *fits* says NO, cut the longest clips in notebook 01.
#
# With a `lora_rank` of 8 in the cell below, **LoRA** trains a small addition to each layer in place of the
# layer: less memory, and a file of a few MB beside the merged weights.

# %%
from f5kit import plan_run

length = {"minutes": minutes or None, "updates": updates or None}
kinds = {"optimizer": optimizer, "precision": precision, "lora_rank": 0}
limit = {"session_minutes": max_minutes or None}
kinds["learning_rate"] = learning_rate or None
plan = plan_run(base_model, dataset, host, **length, **kinds, **limit, seed=seed)
plan

# %% [markdown]
# ## The learning rate
# It rises over the first tenth of the run, so that fresh optimizer statistics do no harm, and then falls to
# zero.

# %%
from f5kit.widgets import Picture

Picture(plan.plot_schedule())

# %% [markdown]
# ## Before
# One held-out sentence that the model never trains on: as it was recorded, and as the base model says it.
# The reference that the model continues is a typical clip of the dataset.

# %%
from f5kit import Voice
from f5kit.widgets import players

run_dir, reference = root / "runs" / run_name, dataset.typical_clip()
sentence = dataset.sample_clip()
speaker = Voice.load(base_model, reference=dataset.path(reference), reference_text=reference.text)
before = speaker.speak(sentence.text, steps=16, seed=seed).save(run_dir / "samples" / "base.wav")
vocoder = speaker.vocoder
del speaker  # the training needs its memory
print(sentence.text)
players({"recorded": dataset.path(sentence), "before": before})

# %% [markdown]
# ## Several GPUs
# Where there is more than one, as on Kaggle's T4 x2, the training runs beside this notebook in one process
# for each, and its lines appear below. The next cell then finds it done.

# %%
import torch

from f5kit.launch import launch

if torch.cuda.device_count() > 1:
    settings = {**length, **kinds, "max_minutes": max_minutes or None}
    launch(dataset.folder, run_dir, base_model, torch.cuda.device_count(), **settings, seed=seed)

# %% [markdown]
# ## Train
# Progress, the loss curve and fresh samples appear below. Every checkpoint is whole on the disk before it
# counts, so you may stop at any time and run this cell again: it goes on as if it had never stopped. With
# `backup`, a session that was cut off goes on from its last copy.

# %%
from f5kit import SampleCallback, Trainer, UserError
from f5kit.backup import Backup, restore_run
from f5kit.log import WandbLogger
from f5kit.widgets import live_progress

if not plan.fits:
    raise UserError("the plan does not fit this machine: its table above says what is short")
samples = SampleCallback(dataset, sentence.text, seed=seed, vocoder=vocoder)
callbacks = [samples, live_progress(samples)]
callbacks += [WandbLogger("f5kit", run_name)] if wandb else []
if backup:
    callbacks.append(Backup(backup))
    restore_run(backup, run_dir)
run = Trainer(plan, dataset, run_dir, callbacks, change=change_run, max_minutes=max_minutes or None).fit()
run

# %% [markdown]
# ## What it took, and the loss
# Memory and time stand beside what the plan had said before. Training losses jump about: every update sees
# other clips and other noise. The held-out losses are measured on the same clips with the same noise each
# time; when they rise while the training loss falls, the run was too long. It then ends by itself, and the
# best checkpoint is the one with the lowest, not the last.

# %%
from f5kit.widgets import loss_figure, table

picture = loss_figure(run.events(), plan.train.updates)
plot = picture.save(root / "plots" / f"loss_{run_name}.png")
judged = [event for event in run.events() if event["event"] == "evaluate"]
losses = {"start": judged[0]["loss_raw"], "end": judged[-1]["loss_raw"], "end_ema": judged[-1]["loss_ema"]}
took = plan.beside(run.events())
shown = {f"held-out loss, {name}": loss for name, loss in losses.items()}
display(table({**took, **shown, "best": f"{run.best['checkpoint']} {run.best['weights']}", "lowest": run.best["loss"]}))
picture

# %% [markdown]
# ## After
# The same sentence again. The newest samples come last; *raw* are the weights as trained, *ema* their
# **EMA** (exponential moving average: a running average of the weights), which is calmer and lags behind in a
# short run. Notebook 04 compares them with care.

# %%
made = sorted((run.path / "samples").glob("update_*.wav"))
players({"recorded": dataset.path(sentence), "before": before, **{path.stem: path for path in made[-6:]}})

# %% [markdown]
# ## Result
# The run's figures, in its own folder: a sweep over parameters is a table of these files.

# %%
result = {"notebook": "<<name>>", "run": run_name, "seconds": round(time.time() - started, 1)}
result |= {"host": str(host), "voice": voice, "base_model": base_model, "train": plan.train.to_dict()}
result |= {"took": took, "losses": losses, "best": run.best, "plots": [str(plot)]}
result["sounds"] = [str(path) for path in [before, *made[-2:]]]
path = run.path / "result.json"
path.write_text(json.dumps(result, indent=2))
result
