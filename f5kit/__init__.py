"""f5kit: finetune a voice with F5-TTS from numbered notebooks.

`import f5kit` does no work: each public name below is imported from its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOME = {  # public name -> the module it lives in
    "UserError": "errors",
    "PRESETS": "config",
    "MelConfig": "config",
    "ModelConfig": "config",
    "TrainConfig": "config",
    "detect_host": "host",
    "secret": "host",
    "read_audio": "audio",
    "write_audio": "audio",
    "log_mel": "audio",
    "Tokenizer": "text",
    "coverage": "text",
    "load_vocoder": "vocoder",
    "load_dataset": "data",
    "prepare_dataset": "prepare",
    "load_transcriber": "transcribe",
    "CFM": "cfm",
    "load_model": "checkpoint",
    "readings": "checkpoint",
    "probe_configs": "probe",
    "convert_model": "convert",
    "export_model": "checkpoint",
    "extend_vocab": "vocab",
    "RunFolder": "runs",
    "named_host": "cards",
    "plan_run": "plan",
    "Trainer": "trainer",
    "Voice": "inference",
    "speak_script": "script",
    "replace_words": "edit",
    "SampleCallback": "evaluate",
    "compare_checkpoints": "evaluate",
    "choose_candidate": "evaluate",
    "text_advantage": "evaluate",
    "judge_voice": "judge",
    "publish": "hub",
    "Backup": "backup",
    "restore_run": "backup",
    "preflight": "preflight",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"f5kit has no {name!r}; it has {', '.join(_HOME)}")
    return getattr(import_module(f"f5kit.{_HOME[name]}"), name)


def __dir__():
    return sorted(__all__)
