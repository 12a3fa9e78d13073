# %% [markdown]
# # 00 · Set up, and hear a first sound
#
# **You get** an environment that works, a report on the machine you were given, and a first sentence spoken
# by the model.
#
# **It takes** a few minutes, most of them for downloading the model's 1.3 GB.
#
# **You need** only this page. A GPU makes the sentence quick (in Colab: *Runtime > Change runtime type > T4
# GPU*; in Kaggle: *Settings > Accelerator > GPU T4 x2*), a CPU is enough to hear it.

# %% [install]

# %% [markdown]
# ## Parameters
# The one form of this notebook; everything has a default that works. With `demo` on it stays offline and
# takes the small voice that comes with f5kit.

# %% [parameters]
workspace = ""  #@param {type:"string"}
base_model = "F5TTS_v1_Base"  #@param {type:"string"}
text = "This is the first sentence that I say on this machine."  #@param {type:"string"}
seed = 0  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# All notebooks read and write below one folder, the workspace. Left empty, it is `f5kit_workspace` in the
# host's own folder: `/content` on Colab, `/kaggle/working` on Kaggle, and where Jupyter was started
# elsewhere.

# %%
import json
import time
from pathlib import Path

from f5kit.host import workspace_root

started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
(root / "sounds").mkdir(parents=True, exist_ok=True)
root

# %% [markdown]
# ## The machine
# Which device works, how much memory it has, and which number format training will use here. Each choice
# comes with its reason: a T4, for one, says that it knows bfloat16, and only imitates it.

# %%
from f5kit import detect_host

host = detect_host()
print(host)
host

# %% [markdown]
# ## Storage and secrets
# A finetuning run of the published model wants about 10 GB of disk. A Hugging Face token is needed only to
# publish, a Weights & Biases key only to log there; here you see whether they are found, never what they
# are.

# %%
from f5kit.host import secret
from f5kit.widgets import table

lasts = {"colab": "until the session ends", "kaggle": "in a saved version", "local": "until deleted"}
table({
    "workspace": root,
    "free disk": f"{host.disk_free_gb:.0f} GB",
    "files there last": lasts[host.platform],
    "HF_TOKEN": "found" if secret("HF_TOKEN") else "not set",
    "WANDB_API_KEY": "found" if secret("WANDB_API_KEY") else "not set",
})

# %% [markdown]
# ## Versions
# What this notebook ran with. Put this table into any question you ask about a run, and the answer will
# come sooner.

# %%
import importlib.metadata

names = ["torch", "torchaudio", "vocos", "accelerate", "bitsandbytes", "huggingface_hub", "ipywidgets"]
there = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
versions = {"python": host.python}
versions |= {name: importlib.metadata.version(name) for name in names if name in there}
table(versions)

# %% [markdown]
# ## From a recording to a mel spectrogram and back
# The model sees and makes mel spectrograms; a vocoder turns them into sound. Here a recording goes there
# and back without any model in between: this copy is the best that any voice on this machine can sound.

# %%
from f5kit import load_vocoder, log_mel, read_audio
from f5kit.inference import demo_reference
from f5kit.widgets import mel_figure, players

recorded, reference_text = demo_reference()
recording = read_audio(recorded)
vocoder = load_vocoder()
copy = vocoder.decode(log_mel(recording))
display(players({"recording": (recording, 24_000), f"the copy, by {vocoder.name}": (copy, 24_000)}))
mel_figure({"recording": log_mel(recording), "copy": log_mel(copy)})

# %% [markdown]
# ## The first sentence
# The base model hears the recording above for a few seconds, and then says your sentence in that voice.
# When its weights can't be had, the small voice that comes with f5kit says it instead, as in the demo.

# %%
from f5kit import UserError, Voice, write_audio

sounds = {"copy": root / "sounds" / "00_copy.wav"}
write_audio(sounds["copy"], copy)
try:
    if demo:
        raise UserError("the demo works offline, and the base model is a download")
    speaker = Voice.load(base_model, recorded, reference_text, vocoder=vocoder)
except UserError as error:
    print(f"The embedded voice speaks: {error}.")
    speaker = Voice.load("starter", vocoder=vocoder)
sounds["first"] = speaker.speak(text, seed=seed).save(root / "sounds" / "00_first.wav")
print(speaker)
players(sounds)

# %% [markdown]
# ## Result
# What this notebook found, in a file that later stages and the runner read.

# %%
result = {"notebook": "<<name>>", "seconds": round(time.time() - started, 1), "host": str(host)}
result |= {"versions": versions, "vocoder": vocoder.name, "sounds": [str(path) for path in sounds.values()]}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
