# %% [markdown]
# # 04 · Choose a checkpoint
#
# **You get** the base model and every checkpoint side by side, by held-out loss and by ear, and one choice,
# written into the run folder for the notebooks after this one.
#
# **It takes** some seconds of speaking for each set of weights on a GPU, and patience on a CPU.
#
# **You need** a run folder from notebook 02 or 03.

# %% [install]

# %% [markdown]
# ## Parameters
# `run_name` is the run to judge (empty: like the voice). Leave `choice` empty to take the lowest held-out
# loss; when your ears disagree, put the winner's name there, such as `update_000400 ema`, and run all
# again.

# %% [parameters]
workspace = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
run_name = ""  #@param {type:"string"}
text = ""  #@param {type:"string"}
choice = ""  #@param {type:"string"}
pairs = 3  #@param {type:"integer"}
steps = 32  #@param {type:"integer"}
seed = 0  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# The run and the dataset it was trained on. An empty `text` stands for a held-out sentence, so that the
# recording can be heard beside the candidates; the demo speaks with fewer steps.

# %%
import json
import time
from pathlib import Path

from f5kit import RunFolder, UserError, load_dataset
from f5kit.host import workspace_root

started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
run = RunFolder(root / "runs" / (run_name or voice))
dataset = load_dataset(run.dataset_folder)
sentence = text or dataset.sample_clip().text
steps, pairs = (8, 2) if demo else (steps, pairs)

# %% [markdown]
# ## Compare
# Each candidate is judged on the same held-out clips with the same noise, and says the same sentence with
# the same seed. What differs is the weights.

# %%
from f5kit import compare_checkpoints
from f5kit.widgets import table

candidates = compare_checkpoints(run, dataset, sentence, steps=steps, seed=seed)
table([{"candidate": c.name, "held-out loss": c.loss} for c in candidates])

# %% [markdown]
# ## Listen
# The sentence as recorded, when it is a held-out one, and as each candidate says it. Listen for dropped
# words first, for the timbre second: the lowest loss is not always the best voice.

# %%
from f5kit.widgets import players

print(sentence)
clip = dataset.sample_clip()
recorded = {} if text else {"recorded": dataset.path(clip)}
folder = root / "sounds" / run.path.name
sounds = {c.name: c.speech.save(folder / f"04_{c.name.replace(' ', '_')}.wav") for c in candidates}
players(recorded | sounds, columns=3)

# %% [markdown]
# ## Look
# The same sentences as spectrograms. Clear stacked lines are voiced sounds, grey clouds are hiss; a picture
# without either has not learned to speak yet.

# %%
from f5kit.widgets import mel_figure

shown = {} if text else {"recorded": dataset.mel(clip)}
picture = mel_figure(shown | {c.name: c.speech.mel for c in candidates})
plot = picture.save(root / "plots" / f"candidates_{run.path.name}.png")
picture

# %% [markdown]
# ## A blind comparison
# The two trained candidates of lowest loss say some held-out sentences, in an order you can't see. Vote by
# the buttons; the names appear after the last pair. Nobody has to vote: the choice below does not wait for
# it.

# %%
from operator import attrgetter

from f5kit import Voice
from f5kit.widgets import blind_ab

trained = sorted((c for c in candidates if c.weights), key=attrgetter("loss"))[:2]
rivals = {c.name: Voice.load(run.checkpoint(c.checkpoint).path, weights=c.weights) for c in trained}
sentences = [clip.text for clip in (dataset.heldout or dataset.train)[:pairs]]
how = {"steps": steps, "seed": seed, "progress": False}
said = [{name: rival.speak(line, **how) for name, rival in rivals.items()} for line in sentences]
blind_ab(said, seed=seed)

# %% [markdown]
# ## Choose
# One candidate becomes the voice. Notebooks 05 and 06 take it from here on.

# %%
names = [c.name for c in candidates if c.weights]
name = choice or trained[0].name
if name not in names:
    raise UserError(f"choice is {choice!r}; the candidates are {', '.join(names)}")
chosen = candidates[[c.name for c in candidates].index(name)]
why = "chosen by ear" if choice else "lowest held-out loss in notebook 04"
run.choose(chosen.checkpoint, chosen.weights, why, chosen.loss)
run.best

# %% [markdown]
# ## Result
# The figures behind the choice, in a file: the losses of all candidates, and which one became the voice.

# %%
result = {"notebook": "<<name>>", "seconds": round(time.time() - started, 1)}
result |= {"run": str(run.path), "losses": {c.name: c.loss for c in candidates}, "chosen": run.best}
result |= {"sounds": [str(path) for path in sounds.values()], "plots": [str(plot)]}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
