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
# takes the small voice that comes with f5kit. `check_card` measures at the end what this GPU really does, in
# five minutes at most.

# %% [parameters]
workspace = ""  #@param {type:"string"}
base_model = "F5TTS_v1_Base"  #@param {type:"string"}
text = "This is the first sentence that I say on this machine."  #@param {type:"string"}
seed = 0  #@param {type:"integer"}
check_card = False  #@param {type:"boolean"}
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
# Which device works, its **VRAM** (the GPU's own memory, where a model, its gradients and the optimizer's
# notes must all fit), and how numbers are kept: training in **mixed precision** (most arithmetic in 16 bits,
# which is smaller and faster, the weights in 32) needs a format the device really has. A T4 says that it
# knows bfloat16, and only imitates it.
#
# The table also tells what a finetune of the base model takes here, and whether two secrets are found; never
# what they are. The estimate counts on what notebook 02 does to fit a small GPU: **8-bit Adam** (an optimizer
# whose notes on each weight are kept in a quarter of the room), **checkpointing** (what a layer computed is
# forgotten and computed again when the gradient needs it), and **gradient accumulation** (several small
# batches add up to one update), of which the plan takes what is the fastest. All weights are trained; **LoRA**
# (training a small addition to each layer in place of the layer) needs less memory: see the plan in notebook 02.

# %%
from f5kit.preflight import preflight

check = preflight(base_model, workspace=root)
host = check.host
print(host)
check

# %% [markdown]
# ## Versions
# What this notebook ran with. Put this table into any question you ask about a run, and the answer will
# come sooner.

# %%
import importlib.metadata

from f5kit.widgets import table

names = ["torch", "torchaudio", "vocos", "accelerate", "bitsandbytes", "huggingface_hub", "ipywidgets"]
there = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
versions = {"python": host.python}
versions |= {name: importlib.metadata.version(name) for name in names if name in there}
table(versions)

# %% [markdown]
# ## From a recording to a mel spectrogram and back
# The model sees and makes **mel spectrograms** (pictures of sound: how loud each of 100 bands of pitch is, 94
# times a second), and a **vocoder** (a network of its own that turns such pictures into sound) does the rest.
# Here a recording goes there and back without any model in between: this copy is the best that any voice on
# this machine can sound.

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
# The base model hears the recording above for a few seconds, and then says your sentence in that voice. It
# was trained by **flow matching** (it starts from noise and has learned which way leads to speech), and walks
# there in steps. Their number, times two, is the **NFE** (number of function evaluations: how often the network
# runs); times two because of **CFG** (classifier-free guidance: each step is taken with and without the text,
# and the difference between them exaggerated). The **RTF** (real-time factor: seconds of computing for a
# second of speech, so that below 1 is faster than talking) is printed under it.
#
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
begun, speech = time.time(), speaker.speak(text, seed=seed)
print(speaker, f"RTF {(time.time() - begun) / speech.seconds:.2f} on {host.device_name}", sep="\n")
sounds["first"] = speech.save(root / "sounds" / "00_first.wav")
players(sounds)

# %% [markdown]
# ## What this card really does
# With `check_card`: updates of training, memory beside the prediction, and sampling, measured and written to a
# file. The authors have few cards: sent with an issue, it makes the plans better for everybody who has yours.

# %%
from f5kit.selfcheck import selfcheck, summary

measured = root / "results" / "selfcheck.json"
if check_card:
    measured.parent.mkdir(parents=True, exist_ok=True)
    print(summary(selfcheck(None, measured)), f"written to {measured}", sep="\n")
else:
    print("Not asked for: set check_card, or run python -m f5kit.selfcheck.")

# %% [markdown]
# ## Result
# What this notebook found, in a file that later stages and the runner read.

# %%
result = {"notebook": "<<name>>", "seconds": round(time.time() - started, 1), "host": str(host)}
result |= {"preflight": check.rows, "versions": versions, "vocoder": vocoder.name}
result["sounds"] = [str(path) for path in sounds.values()]
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
