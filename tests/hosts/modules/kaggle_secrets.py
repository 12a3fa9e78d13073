"""kaggle_secrets as Kaggle's image has it, backed by the JSON file that HOST_SECRETS names."""

import json
import os
from pathlib import Path

if not os.environ.get("KAGGLE_KERNEL_RUN_TYPE"):  # the other hosts have no such module
    raise ImportError("kaggle_secrets")


class BackendError(Exception):
    pass


class ValidationError(Exception):
    pass


class UserSecretsClient:
    def get_secret(self, label):
        if label is None or len(label) == 0:
            raise ValidationError("Label must be non-empty.")
        file = os.environ.get("HOST_SECRETS")
        stored = json.loads(Path(file).read_text()).get("kaggle", {}) if file else {}
        if label not in stored:
            raise BackendError(f"No user secrets exist for kernel id and label {label}.")
        return stored[label]
