"""google.colab.drive: `mount` makes the folder MyDrive below the mount point, as Drive's file system does."""

import os as _os


def mount(mountpoint, force_remount=False, timeout_ms=120000, readonly=False):
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    if _os.environ.get("HOST_DRIVE") == "refused":
        raise ValueError("mount failed")
    _os.makedirs(_os.path.join(mountpoint, "MyDrive"), exist_ok=True)
    print(f"Mounted at {mountpoint}")


def flush_and_unmount(timeout_ms=24 * 60 * 60 * 1000):
    pass
