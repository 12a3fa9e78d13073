# %% [markdown]
# # 07 · Serve
#
# **You get** your voice behind an HTTP API on this machine: other programs send text and get sound, also those
# that were written for OpenAI's speech API. You call it, see how long answers take, and stop it.
#
# **It takes** a minute.
#
# **You need** a run folder from notebook 02 or 03; notebook 04's choice is used when there is one. The server
# answers to this machine alone: nobody on the internet reaches it here, and Colab's rules forbid tunnels. To
# serve others, run the one command of the last section on a machine of your own.

# %% [install]

# %% [markdown]
# ## Parameters
# What to say, in how many steps of the solver, and how many callers ask at once at most when the answers are
# timed.

# %% [parameters]
workspace = ""  #@param {type:"string"}
voice = "my_voice"  #@param {type:"string"}
run_name = ""  #@param {type:"string"}
text = "Hello there. I learned to speak in a notebook."  #@param {type:"string"}
nfe_step = 16  #@param {type:"integer"}
seed = 0  #@param {type:"integer"}
callers = 4  #@param {type:"integer"}
demo = False  #@param {type:"boolean"}

# %% [markdown]
# ## The voice
# The chosen checkpoint of the run. A server needs a few packages more than the other notebooks; those that this
# machine has stay as they are.

# %%
import json
import time
from pathlib import Path

from f5kit import RunFolder, Voice
from f5kit.host import workspace_root

print(install_missing(source, extras=("serve",)))
started = time.time()
root = Path(workspace or workspace_root() / "f5kit_workspace").resolve()
run = RunFolder(root / "runs" / (run_name or voice))
speaker = Voice.load(run.path)
speaker

# %% [markdown]
# ## Start
# One line. The server runs in the background of this notebook, has spoken once already so that the first caller
# waits for nothing, and takes any free port.

# %%
from f5kit.serve import serve

server = serve({voice: speaker}, port=0)
server

# %% [markdown]
# ## Call it
# As any program would: a form is posted, a sound file comes back. It says of itself that it is synthetic, and by
# which model.

# %%
import httpx

from f5kit.widgets import players

client = httpx.Client(base_url=server.url, timeout=600)
fields = {"gen_text": text, "voice": voice, "nfe_step": nfe_step, "seed": seed}
answer = client.post("/tts", data=fields).raise_for_status()
sound = root / "sounds" / run.path.name / "07_served.wav"
sound.parent.mkdir(parents=True, exist_ok=True)
sound.write_bytes(answer.content)
print(answer.headers["x-provenance"], f"after {answer.elapsed.total_seconds():.2f} s")
players({text: sound})

# %% [markdown]
# ## OpenAI's form
# Programs that speak through OpenAI's API need two things changed: the address, and the name of the voice. The
# answer is an MP3 that comes while it is made.

# %%
body = {"model": "f5kit", "voice": voice, "input": text, "nfe_step": nfe_step, "seed": seed}
with client.stream("POST", "/v1/audio/speech", json=body) as answer:
    answer.raise_for_status()
    mp3 = b"".join(answer.iter_bytes())
spoken = sound.with_suffix(".mp3")
spoken.write_bytes(mp3)
players({f"{len(mp3) / 1000:.0f} kB of MP3": spoken})

# %% [markdown]
# ## How long answers take
# The same sentence, asked for by one caller, by two at once, and so on. Callers who come at the same time share
# the model: a GPU speaks for several in one go, a processor for two side by side.

# %%
from concurrent.futures import ThreadPoolExecutor

latency = {}
for crowd in sorted({1, 2, callers} if callers > 1 else {1}):
    with ThreadPoolExecutor(crowd) as pool:
        asked = [pool.submit(client.post, "/tts", data={**fields, "seed": n}) for n in range(2 * crowd)]
    latency[crowd] = [one.result().raise_for_status().elapsed.total_seconds() for one in asked]

# %% [markdown]
# Each dot is an answer. Where the line stays flat, callers do not feel each other.

# %%
from f5kit.widgets import latency_figure

picture = latency_figure(latency)
plot = picture.save(root / "plots" / f"latency_{run.path.name}.png")
picture

# %% [markdown]
# ## What it counts
# The page `/metrics` is made for Prometheus; these are some of its lines. Texts are in no log.

# %%
metrics = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
counted = {name: float(value) for name, value in metrics.items() if name.startswith("f5kit_") and "{" not in name}
counted

# %% [markdown]
# ## Stop
# What is being spoken ends first. Elsewhere the same server is started by the command that is printed below; for
# callers on other machines it asks for keys.

# %%
client.close()
server.stop()
print(server)
print(f"python -m f5kit.serve --voice {voice}={run.path}")

# %% [markdown]
# ## Result
# How long answers took, for how many callers at once, and where the sounds and the plot lie.

# %%
result = {"notebook": "<<name>>", "run": str(run.path), "seconds": round(time.time() - started, 1)}
result |= {"text": text, "latency": latency, "audio_seconds": counted["f5kit_audio_seconds_total"]}
result |= {"sounds": [str(sound)], "plots": [str(plot)]}
path = root / "results" / "<<name>>" / "result.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(result, indent=2))
result
