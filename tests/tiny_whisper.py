"""A Whisper of 0.7 MB with random weights, in CTranslate2's form: it hears nothing, but all of its machinery runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def make_tiny_whisper(folder: Path) -> Path:
    """Make the model in `folder`/model and return that folder. Needs transformers and ctranslate2."""
    import torch

    from f5kit.audio import import_torchaudio

    import_torchaudio()  # transformers imports it, and would fail where its compiled half does not load
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    # Whisper's order: text, end, start, 100 languages, tasks, markers, 1501 times. The empty token makes CTranslate2
    # take it for multilingual.
    text = ["", *sorted(ByteLevel.alphabet()), *(f"w{n}" for n in range(300))]
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    special += [
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]
    special += [f"<|{n * 0.02:.2f}|>" for n in range(1501)]
    ids = {token: place for place, token in enumerate([*text, *special])}
    torch.manual_seed(0)
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    config = WhisperConfig(
        vocab_size=len(ids), num_mel_bins=128, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_ffn_dim=32, max_target_positions=448,
        decoder_start_token_id=start, eos_token_id=end, bos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    # Built directly: made from the model's config, it would forget its languages when it is loaded again.
    model.generation_config = GenerationConfig(
        lang_to_id={f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}, alignment_heads=[[0, 0]],
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}, is_multilingual=True,
        no_timestamps_token_id=ids["<|notimestamps|>"], decoder_start_token_id=start, eos_token_id=end, max_length=32,
        pad_token_id=end, bos_token_id=end, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    made = folder / "transformers"
    model.save_pretrained(made)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(made)
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "added_tokens": [{"id": ids[token], "content": token, "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False} for token in special],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
                  "vocab": {token: ids[token] for token in text}, "merges": []},
    }  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    convert = (
        "from f5kit.audio import import_torchaudio; import_torchaudio()\n"
        "from ctranslate2.converters import TransformersConverter as C; import sys\n"
        "files = ['tokenizer.json', 'preprocessor_config.json']\n"
        "C(sys.argv[1], copy_files=files).convert(sys.argv[2], quantization='int8')"
    )
    out = folder / "model"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", convert, made, out], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out
