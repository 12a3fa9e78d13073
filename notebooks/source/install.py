# %% [markdown]
# ## Install
# Inside a clone of the repository this takes the code that lies there; anywhere else the release that this
# notebook belongs to, or a wheel of it among Kaggle's inputs. What the host brings along keeps its version.

# %%
import importlib.util, os, pathlib, subprocess, sys  # noqa: E401, I001
here, wanted = pathlib.Path.cwd(), os.environ.get("F5KIT_SOURCE")
clone = next((str(p) for p in [here, *here.parents] if (p / "f5kit/host.py").is_file()), None)
wheels = sorted(str(path) for path in pathlib.Path("/kaggle/input").glob("**/f5kit-*.whl"))
source = wanted or (wheels or ["f5kit @ git+<<repository>>@v<<version>>"])[-1]
if clone and not wanted:
    sys.path[:0] = [] if clone in sys.path else [clone]
elif wanted or not importlib.util.find_spec("f5kit"):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", source]
    if subprocess.run(pip).returncode:
        raise RuntimeError(f"pip did not install {source}; its reason is above. Is the internet on?")
    importlib.invalidate_caches()
from f5kit.install import install_missing  # noqa: E402

print(install_missing(source))
