"""google.colab.userdata: secrets of the page. Here they come from the JSON file that HOST_SECRETS names."""

import json as _json
import os as _os
import pathlib as _pathlib


class SecretNotFoundError(Exception):
    def __init__(self, name):
        super().__init__(f"Secret {name} does not exist.")


class NotebookAccessError(Exception):
    def __init__(self, name):
        super().__init__(f"Notebook does not have access to secret {name}")


class TimeoutException(Exception):
    def __init__(self, name):
        super().__init__(f"Requesting secret {name} timed out: it can be fetched from the Colab UI alone.")


def get(key):
    file = _os.environ.get("HOST_SECRETS")
    if not file:
        raise TimeoutException(key)
    stored = _json.loads(_pathlib.Path(file).read_text()).get("colab", {})
    if key not in stored:
        raise SecretNotFoundError(key)
    if stored[key] is None:
        raise NotebookAccessError(key)
    return stored[key]
