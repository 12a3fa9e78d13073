# %% [markdown]
# # 05 · Speak
#
# **You get** your voice saying what you type: one sentence straight away, and a panel to play with, where you
# upload or record a reference, change text, speed, steps, guidance, seed and weights, and compare two takes.
#
# **It takes** seconds for a sentence on a GPU.
#
# **You need** a run folder from notebook 02 or 03; notebook 04's choice is used when there is one.

# %% [install]

# %% [markdown]
# ## Parameters
# What to say first, and how. More `steps` make a cleaner sound and take longer; more `guidance` keeps
# closer to text and reference; another `seed` is another take of the same sentence.

# %% [parameters]
workspace = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
run_name = ""  #@param {type:"string"}
text = "Hello there. I learned to speak in a notebook."  #@param {type:"string"}
speed = 1.0  #@param {type:"number"}
steps = 32  #@param {type:"integer"}
guidance = 2.0  #@param {type:"number"}
seed = 0  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# ## Load the voice
# The chosen checkpoint of the run, with a typical clip of its dataset as the reference to continue. The
# line below says which weights, which reference and which vocoder it came to.

# %%
import json
import time
from pathlib import Path

from f5kit import RunFolder, Voice, load_dataset
from f5kit.host import workspace_root

started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
run = RunFolder(root / "runs" / (run_name or voice))
dataset = load_dataset(run.dataset_folder)
speaker = Voice.load(run.path, reference="auto")
speaker

# %% [markdown]
# ## One sentence
# The reference first, then your sentence, which also lies as a file in the workspace's `sounds` folder.

# %% [check]
from f5kit.widgets import players

speech = speaker.speak(text, speed=speed, steps=steps, cfg_strength=guidance, seed=seed)
sound = speech.save(root / "sounds" / run.path.name / "05_speech.wav")
print(sound)
players({f"reference: {speaker.reference.text}": (speaker.reference.audio, speech.sample_rate), text: speech})

# %% [markdown]
# ## What it looks like
# The spectrogram that the model made and the vocoder turned into sound.

# %%
from f5kit.widgets import mel_figure

picture = mel_figure({"reference": speaker.reference.mel, "speech": speech.mel})
plot = picture.save(root / "plots" / f"speech_{run.path.name}.png")
picture

# %% [markdown]
# ## The panel
# Choose a clip as reference, upload a recording or record yourself; type what it says, or leave that to a
# recogniser. Below the text stands what the model can't read of it. *Generate* speaks, *Cancel* stops; from
# the second take on you can hear two side by side. All takes are kept in the `sounds` folder.

# %%
from f5kit.widgets import run_weights, speak_panel

panel = speak_panel(speaker, root / "sounds" / run.path.name, dataset, weights=run_weights(run))
panel.text.value, panel.speed.value, panel.steps.value = text, speed, steps
panel.guidance.value, panel.seed.value = guidance, seed
panel

# %% [markdown]
# ## Result
# What was said, by which weights and through which vocoder, and where the sound file lies.

# %%
result = {"notebook": "<<name>>", "run": str(run.path), "seconds": round(time.time() - started, 1)}
result |= {"text": text, "weights": run.best, "vocoder": speaker.vocoder.name}
result |= {"speech_seconds": speech.seconds, "sample_rate": speech.sample_rate}
result |= {"sounds": [str(sound)], "plots": [str(plot)]}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
