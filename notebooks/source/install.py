# %% [markdown]
# ## Install
# Inside a clone of the repository this takes the code that lies there; anywhere else it installs the
# release that this notebook belongs to. What the host brings along, torch above all, keeps its version.

# %%
import importlib.metadata, importlib.util, os, pathlib, subprocess, sys, tempfile  # noqa: E401, I001

here = pathlib.Path.cwd()
clone = next((str(p) for p in [here, *here.parents] if (p / "f5kit/host.py").is_file()), None)
wanted, found = os.environ.get("F5KIT_SOURCE"), importlib.util.find_spec("f5kit")
if wanted or not found or (clone and not found.origin.startswith(clone)):
    have = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    keep = "torch torchaudio torchvision torchcodec triton numpy ipython ipykernel ipywidgets".split()
    pins = pathlib.Path(tempfile.mkdtemp(), "keep.txt")
    pins.write_text("\n".join(f"{name}=={have[name]}" for name in keep if name in have))
    source = [wanted] if wanted else ["-e", clone] if clone else ["f5kit @ git+<<repository>>@v<<version>>"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(pins), *source], check=True)
    sys.path[:0] = [clone] if clone and not wanted else []  # running kernels overlook editable installs
    importlib.invalidate_caches()
