# %% [markdown]
# # 01 · Prepare the recordings
#
# **You get** a clean dataset out of messy recordings: cut at pauses, written down where there is no text,
# resampled, trimmed, levelled, checked, with a few clips held out to judge by, and a report to look at and
# listen to. Nothing is dropped in silence: whatever is not used has a row that says why.
#
# **It takes** about a minute for an hour of recordings that have their texts; writing down an hour takes
# about ten minutes on a T4.
#
# **You need** recordings in almost any form: a folder or an archive with a `metadata.csv` or a text file
# beside each recording, one long recording (sound or video), or a data set of the Hub. Ten minutes of one
# speaker are enough to begin with. No recordings at hand? Switch `demo` on.

# %% [install]

# %% [markdown]
# ## Parameters
# `source` is your folder, archive, table, recording, or `hf://owner/name?split=train`; `language` its code,
# `voice` the name the dataset will have. `transcribe` writes down what has no text, and `check_texts` has a
# recogniser read along where there is one. `heldout` clips are kept from the training, to judge by (0: one
# in twenty). `consent` says by what right you use this voice; it goes into
# the model card later, and nothing is prepared without it.

# %% [parameters]
workspace = ""  #@param {type:"string"}
source = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
language = "en"  #@param {type:"string"}
consent = ""  #@param ["", "I am the speaker", "The speaker agreed", "Public domain"] {allow-input: true}
transcribe = True  #@param {type:"boolean"}
check_texts = False  #@param {type:"boolean"}
whisper = "auto"  #@param {type:"string"}
loudness = -23.0  #@param {type:"number"}
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
# ## More packages
# Cutting and writing down need a few more. The recogniser's model is downloaded when the first recording
# without a text turns up. It is tried in a process of its own; where the GPU's libraries do not fit, the
# CPU does the work.

# %%
from f5kit.install import install_missing

transcriber = whisper if not demo and (transcribe or check_texts) else None
if transcriber:
    print(install_missing(extras=("data",)))

# %% [markdown]
# ## Prepare
# Every recording is read, brought to 24 kHz mono, cut at pauses when it is long, trimmed of silence and
# levelled. A clip that can't be used becomes a rejected row with its reason. Run it again after a change:
# only what is new or changed is worked on, and after an interruption it continues.

# %%
from f5kit import Tokenizer, coverage, prepare_dataset
from f5kit.checkpoint import load_tokenizer

base_model = "starter" if demo else base_model
known = load_tokenizer(base_model)
reading = known.normaliser + (f"+numbers:{language}" if numbers else "")
needed = Tokenizer(known.vocab, known.name, reading)
dataset = prepare_dataset(
    source, root / "data" / voice, name=voice, seed=seed, heldout=heldout or None, language=language or None,
    loudness=loudness, transcriber=transcriber, check_texts=check_texts, tokenizer=needed, normaliser=reading,
)
dataset

# %% [markdown]
# ## The report
# How much there is, how it is spread, and the ten clips that each check finds worst, with players. Read
# along: a transcript that differs from what is spoken teaches the model to mumble. The same page lies in
# the dataset's folder as `report.html`, which opens in any browser.

# %%
from f5kit.review import dataset_report

counts = {name: dataset.report[name] for name in ("seen", "accepted", "repaired", "rejected")}
counts |= {"minutes": dataset.seconds / 60, "train": len(dataset.train), "held out": len(dataset.heldout)}
dataset_report(dataset)

# %% [markdown]
# ## Take out what is no good
# Choose what to look at, listen, untick, save. Then run the cell *Prepare* again: it leaves those clips out,
# and takes seconds.

# %%
from f5kit.review import ReviewPanel

ReviewPanel(dataset)

# %% [markdown]
# ## Letters the model does not know
# A model can speak only the characters of its vocabulary. What is listed here is in your transcripts and
# not in the model's, with places where it stands: a slip of the keyboard is mended in the transcripts, a
# letter of your language is added in the next cell.

# %% [check]
from f5kit.widgets import table

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
result |= {"report": str(dataset.folder / "report.html")}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
