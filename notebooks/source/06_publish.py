# %% [markdown]
# # 06 · Publish
#
# **You get** a folder that holds your voice and nothing else: weights, reference, samples and a model card;
# on the Hugging Face Hub if you want it there.
#
# **It takes** a minute, and the upload.
#
# **You need** a run folder from notebook 02 or 03. To push, also a repository name in the form and a token
# with write access as the secret `HF_TOKEN` of Colab or Kaggle, or in the environment; never in a cell.

# %% [install]

# %% [markdown]
# ## Parameters
# Without `repo_id` or token nothing leaves this machine: the folder is built, checked and shown. Pushed
# repositories are private until you decide otherwise on the Hub. Empty `consent` and `language` are taken
# from notebook 01, an empty `licence` from the base model, which may forbid others.

# %% [parameters]
workspace = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
run_name = ""  #@param {type:"string"}
repo_id = ""  #@param {type:"string"}
language = ""  #@param {type:"string"}
consent = ""  #@param ["", "I am the speaker", "The speaker agreed", "Public domain"] {allow-input: true}
licence = ""  #@param ["", "cc-by-nc-4.0", "cc-by-4.0", "cc0-1.0", "mit"] {allow-input: true}
text = "Hello there. I learned to speak in a notebook."  #@param {type:"string"}
seed = 0  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# The voice is a run folder in the workspace, as notebook 02 or 03 left it and notebook 04 chose from it; on
# Kaggle, one in the output of an earlier version is brought in first.

# %%
import json
import time
from pathlib import Path

from f5kit import RunFolder, UserError
from f5kit.backup import restore_workspace
from f5kit.host import workspace_root

started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
restore_workspace(root)  # on Kaggle: the output of an earlier version, added as an input
run = RunFolder(root / "runs" / (run_name or voice))

# %% [markdown]
# What notebook 01 was told about this voice is read from its result, when that result is about the same
# voice. Without a statement of consent there is no card, and without a card no voice should travel.

# %%
file = root / "results" / "01_prepare_data" / "result.json"
judged = root / "judged" / run.path.name
if file.is_file() and (told := json.loads(file.read_text()))["voice"] == voice:
    consent, language = consent or told["consent"], language or told["language"]
if not (consent and language):
    raise UserError("consent or language is empty, and notebook 01 told neither: fill in the form")

# %% [markdown]
# ## A sample
# One sentence by the chosen checkpoint. It goes into the folder as a sample, and is the yardstick for the
# check further down.

# %%
from f5kit import Voice

original = Voice.load(run.path)
sample = original.speak(text, steps=16, seed=seed)
print(original)
sample

# %% [markdown]
# ## Export
# Weights in half precision, what they mean, the reference with its words, the sample, and the card, with what
# the judge of notebook 04 found. A training checkpoint is several times as large; none of its optimizer state
# leaves this machine.

# %%
from f5kit.hub import build_export
from f5kit.widgets import table

how = {"language": language, "consent": consent, "licence": licence or None, "repo_id": repo_id or None}
how["judged"] = judged if (judged / "report.json").is_file() else None
folder = build_export(run, root / "exports" / run.path.name, samples=[sample], **how)
files = sorted(path for path in folder.rglob("*") if path.is_file())
table({path.relative_to(folder): f"{path.stat().st_size / 1e6:.2f} MB" for path in files})

# %% [markdown]
# ## The model card
# What others will read first. Its figures come from the run itself, its licence from the base model. Edit
# `README.md` in the folder if you have more to say.

# %%
from IPython.display import Markdown

card = (folder / "README.md").read_text(encoding="utf-8")
Markdown(card.split("---", 2)[-1])  # without the header that the Hub reads

# %% [markdown]
# ## Check
# The folder is loaded as a stranger would load it, and says the same sentence. It passes when the two
# differ by the rounding to half precision and by nothing else.

# %%
from f5kit.hub import verify_export
from f5kit.widgets import players

check = verify_export(folder, text, original, seed=seed)
print(check)
if not check.ok:
    raise UserError(f"the export is not the voice it was made from: {check.why}")
players({"the run": sample, "the export": check.speech})

# %% [markdown]
# ## Publish
# With a repository name and a token this pushes, to a private repository and by one commit, so that nobody
# ever finds a half of it; otherwise it says what would be pushed. What was pushed is fetched back into an empty
# folder and has to say the sentence once more.

# %%
from f5kit import publish

published = publish(folder, repo_id or None, dry_run=demo or not repo_id)
print(published)
if not published.dry_run:
    print(verify_export(repo_id, text, original, seed=seed))

# %% [markdown]
# ## Result
# Where the folder lies, what is in it, where it was pushed to, and how close it is to the voice in the run.

# %%
result = {"notebook": "<<name>>", "run": str(run.path), "seconds": round(time.time() - started, 1)}
result |= {"export": str(folder), "files": published.files, "url": published.url, "check": str(check)}
result |= {"distance": check.distance, "sounds": [str(path) for path in sorted(folder.glob("samples/*"))]}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
