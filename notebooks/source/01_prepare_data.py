# %% [markdown]
# # 01 · Prepare the recordings
#
# **You get** a clean dataset out of a folder of recordings: resampled, trimmed, levelled, with a few clips
# held out to judge by, and a report to look at and listen to.
#
# **It takes** about a minute for an hour of recordings; no GPU is used.
#
# **You need** a folder with a `metadata.csv` (a line a clip: `name|text`, as in LJSpeech), or pairs of
# `clip.wav` and `clip.txt`. Ten minutes of one speaker are enough to begin with. No recordings at hand?
# Switch `demo` on.

# %% [install]

# %% [markdown]
# ## Parameters
# `source` is your folder, `language` its code, `voice` the name the dataset will have. `consent` says by
# what right you use this voice; it goes into the model card later, and nothing is prepared without it.
# `heldout` clips are kept from the training, to judge by (0: one in twenty).

# %% [parameters]
workspace = ""  #@param {type:"string"}
source = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
language = "en"  #@param {type:"string"}
consent = ""  #@param ["", "I am the speaker", "The speaker agreed", "Public domain"] {allow-input: true}
base_model = "F5TTS_v1_Base"  #@param {type:"string"}
extend = True  #@param {type:"boolean"}
numbers = False  #@param {type:"boolean"}
heldout = 0  #@param {type:"integer"}
seed = 0  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# A voice belongs to its speaker. The next cell stops here when `consent` is empty; the demo's recordings
# are free to use, so it fills in what is true of them.

# %%
import json
import time
from pathlib import Path

from f5kit import UserError
from f5kit.host import workspace_root

started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
if demo:
    source, consent = "demo", "the bundled demo recordings are free to use"
    heldout = heldout or 13  # three to choose a checkpoint by and ten to measure the choice
if not consent:
    raise UserError("consent is empty: say in the form by what right you use this voice, and run again")

# %% [markdown]
# ## Prepare
# Every recording is read, brought to 24 kHz mono, trimmed of silence and levelled. A clip that can't be
# used becomes a rejected row with its reason; nothing disappears. The same recordings are recognised and
# not prepared twice.

# %%
from f5kit import prepare_dataset

dataset = prepare_dataset(source, root / "data" / voice, name=voice, seed=seed, heldout=heldout or None)
dataset

# %% [markdown]
# ## The report
# How much there is, and how it is spread over lengths, letters and levels. Look for clips much longer or
# louder than the rest: they are where transcripts and sound most often disagree.

# %%
from IPython.display import Image

from f5kit.widgets import table

counts = {name: dataset.report[name] for name in ("seen", "accepted", "repaired", "rejected")}
counts |= {"minutes": dataset.seconds / 60, "train": len(dataset.train), "held out": len(dataset.heldout)}
display(table(counts))
Image(str(dataset.folder / "report.png"))

# %% [markdown]
# ## Listen
# Four clips that a model will learn from, as they are now. Read along: a transcript that differs from what
# is spoken teaches the model to mumble.

# %%
from f5kit.widgets import players

spread = dataset.clips[:: len(dataset.clips) // 4 + 1]
players({f"{clip.id} ({clip.seconds:.1f} s): {clip.text}": dataset.path(clip) for clip in spread})

# %% [markdown]
# ## What was mended, what was refused
# A repaired clip had a fault that could be mended, and is used. A rejected one is not; its reason names the
# remedy.

# %%
rows = [row for row in dataset.rows() if row["status"] != "accepted"]
if not rows:
    print("Every clip was accepted as it was.")
shown = [{**{k: row[k] for k in ("status", "id", "text")}, "why": "; ".join(row["reasons"])} for row in rows]
display(table(shown[:40]))
players({row["id"]: dataset.folder / row["audio"] for row in rows[:4] if row["audio"]})

# %% [markdown]
# ## Letters the model does not know
# A model can speak only the characters of its vocabulary. What is listed here is in your transcripts and
# not in the model's, with places where it stands: a slip of the keyboard is mended in the transcripts, a
# letter of your language is added in the next cell.

# %% [check]
from f5kit import Tokenizer, coverage
from f5kit.checkpoint import load_tokenizer

base_model = "starter" if demo else base_model
known = load_tokenizer(base_model)
reading = known.normaliser + (f"+numbers:{language}" if numbers else "")
needed = Tokenizer(known.vocab, known.name, reading)
missing = coverage([clip.text for clip in dataset.clips], needed)
print(f"{base_model} knows {len(known.vocab)} tokens; your texts need {len(missing)} others")
table([{"missing": repr(k), "times": m.count, "as in": ", ".join(m.examples)} for k, m in missing.items()])

# %% [markdown]
# ## Teach it the new letters
# Each new letter starts as the plain letter it comes from (ñ as n), and training moves it from there. The
# base model with its larger vocabulary goes to `models/` in the workspace, where notebook 02 finds it.

# %%
from f5kit import extend_vocab

extended = root / "models" / f"{voice}_base"
if extend and (missing or numbers):
    print(extend_vocab(base_model, missing, extended, normaliser=reading))
else:
    extended = None
    print("Nothing is added: " + (f"{len(missing)} tokens stay unknown" if missing else "every letter is known"))

# %% [markdown]
# ## Result
# What this notebook made, in a file for whoever compares datasets later.

# %%
result = {"notebook": "<<name>>", "seconds": round(time.time() - started, 1), "voice": voice}
result |= {"language": language, "consent": consent, "dataset": str(dataset.folder), **counts}
result |= {"missing_characters": {token: found.count for token, found in missing.items()}}
result |= {"extended": extended and str(extended), "plots": [str(dataset.folder / "report.png")]}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
