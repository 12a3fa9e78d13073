"""Voices over HTTP under load, and beside upstream's socket server.

    .venv-parity/bin/python benchmarks/serve.py                        60 s of 8 callers, then 3 rounds of 60 s each
    .venv-parity/bin/python benchmarks/serve.py --seconds 5 --rounds 1   a look

First `python -m f5kit.serve` with the embedded voice, as it is by default: every answer is compared with what the same
seed says alone, and the server's memory is sampled. Then two servers with the same random weights of the embedded
voice's structure (without letter lengths, which upstream has not), the same vocoder of the published Vocos structure,
the same reference, texts and steps, in turns: ours streams raw PCM from /tts, upstream's f5_tts/socket_server.py sends
floats. Each guesses how long a text takes by its own rule, so seconds of sound are counted beside requests. Each runs
as a process of its own with all cores. Upstream's server loads through packages that are not here, and through the Hub:
those loaders are replaced (`upstream_server`); what it computes and sends is its own code.
Writes benchmarks/results/serve.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speak import circumstances, make_vocoder, timed  # noqa: E402

from f5kit.checkpoint import export_model, fresh_model, load_model  # noqa: E402
from f5kit.config import PRESETS  # noqa: E402
from f5kit.inference import Voice, demo_reference  # noqa: E402
from f5kit.reference import read_reference  # noqa: E402
from f5kit.text import Tokenizer, english_vocab  # noqa: E402
from f5kit.weights import write_tensors  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["Good evening, everybody.", "The river ran high that spring.", "Nobody is at home.",
         "She asked the town, and the town said nothing at all."]  # fmt: skip
SEEDS = (0, 1, 2)
CALLERS = 8


def load(ask, seconds: float, callers: int = CALLERS) -> list[dict]:
    """Rows of {first, whole, bytes, fault} of `callers` that ask one thing after the other for so long."""
    rows, end = [], time.monotonic() + seconds

    def caller(number: int) -> None:
        turn = number
        while time.monotonic() < end:
            started, row = time.monotonic(), {"case": turn % (len(TEXTS) * len(SEEDS)), "fault": None}
            try:
                row["first"], row["data"] = ask(TEXTS[turn % len(TEXTS)], SEEDS[turn // len(TEXTS) % len(SEEDS)])
            except Exception as error:
                row["fault"] = f"{type(error).__name__}: {error}"
            row["whole"] = time.monotonic() - started
            rows.append(row)
            turn += 1

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def http_asker(url: str, steps: int):
    """A function (text, seed) -> (seconds to the first byte of sound, all bytes of raw PCM)."""
    client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))

    def ask(text: str, seed: int) -> tuple[float, bytes]:
        started, first, data = time.monotonic(), None, b""
        fields = {"gen_text": text, "seed": seed, "nfe_step": steps, "format": "pcm", "stream": "true"}
        with client.stream("POST", "/tts", data=fields) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read()[:200]}")
            for part in answer.iter_raw():
                first = first or time.monotonic() - started
                data += part
        return first, data

    return ask


def socket_asker(port: int):
    """The same from upstream's server: a connection for each text, floats until END."""

    def ask(text: str, seed: int) -> tuple[float, bytes]:
        started, first, data = time.monotonic(), None, b""
        with socket.create_connection(("127.0.0.1", port), timeout=600) as sock:
            sock.sendall(text.encode())
            while not data.endswith(b"END"):
                block = sock.recv(65_536)
                if not block:
                    raise RuntimeError("closed before END")
                first = first or time.monotonic() - started
                data += block
        return first, data[:-3]

    return ask


def figures(rows: list[dict], seconds: float, bytes_a_sample: int) -> dict:
    """What a round came to. Audio and answers are counted over the time until the last answer."""
    good = [row for row in rows if not row["fault"]]
    first = sorted(row["first"] for row in good)
    audio = sum(len(row["data"]) / bytes_a_sample / 24_000 for row in good)
    return {
        "requests": len(rows), "lost": len(rows) - len(good), "faults": sorted({row["fault"] for row in rows} - {None}),
        "requests_per_second": len(good) / seconds, "audio_seconds_per_second": audio / seconds,
        "first_byte_p50": statistics.median(first), "first_byte_p95": first[int(0.95 * (len(first) - 1))],
        "whole_p50": statistics.median(row["whole"] for row in good),
    }  # fmt: skip


class Child:
    """A server in a process of its own; its first printed line that holds an address says where."""

    def __init__(self, *command: str):
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
        self.process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, env=env, text=True,
                                        stderr=subprocess.DEVNULL, cwd=tempfile.mkdtemp())  # fmt: skip
        for line in self.process.stdout:
            if "http://" in line or "port " in line:
                self.address = next(w.strip(",;") for w in line.split() if "http://" in w or w.isdigit())
                break
        else:
            raise SystemExit(f"{command} did not start: exit status {self.process.wait()}")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(60)


# ---- The embedded voice under load


def embedded(seconds: float, steps: int) -> dict:
    voice = Voice.load("starter")
    right = {}
    for case in range(len(TEXTS) * len(SEEDS)):
        text, seed = TEXTS[case % len(TEXTS)], SEEDS[case // len(TEXTS) % len(SEEDS)]
        pieces = voice.stream(text, steps=steps, seed=seed)
        right[case] = torch.cat([piece.audio for piece in pieces]).clamp(-1, 1).numpy()
    del voice
    memory: list[float] = []
    with Child("-m", "f5kit.serve", "--voice", "starter=starter", "--port", "0") as child:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.25):
                memory.append(child.memory_mb())

        ask = http_asker(child.address, steps)
        ask(TEXTS[0], 0)
        watcher = threading.Thread(target=watch)
        watcher.start()
        took, rows = timed(lambda: load(ask, seconds), "cpu")
        over.set()
        watcher.join()
    far = []
    for row in rows:
        if not row["fault"]:
            samples = numpy.frombuffer(row["data"], "<i2") / 32767
            same = samples.shape == right[row["case"]].shape
            far.append(float(abs(samples - right[row["case"]]).max()) if same else 2.0)
    quarter = max(1, len(memory) // 4)
    early, late = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "voice": "starter", "vocoder": "griffin-lim", "steps": steps, "callers": CALLERS, "seconds": took,
        **figures(rows, took, 2), "wrong": sum(f > 1e-4 for f in far), "largest_difference": max(far),
        "memory_mb": {"second_quarter": early, "last_quarter": late, "growth": late - early, "highest": max(memory)},
    }  # fmt: skip


# ---- Beside upstream's server


def make_weights(folder: Path) -> None:
    """One random model in f5kit's layout and in upstream's, and a reference."""
    preset = PRESETS["starter"].replace(letter_lengths=False, mel_mean=0.0, mel_std=1.0)
    model = fresh_model(preset, Tokenizer(english_vocab()))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.02)
    export_model(model, folder / "ours", torch.float32)
    tensors = {f"ema_model.{name}": tensor for name, tensor in model.state_dict().items()}
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in english_vocab()), encoding="utf-8")
    arch = {
        "dim": preset.dim, "depth": preset.depth, "heads": preset.heads, "ff_mult": preset.ff_mult,
        "text_dim": preset.text_dim, "conv_layers": preset.conv_layers, "text_mask_padding": preset.text_mask_padding,
        "text_embedding_average_upsampling": preset.average_upsampling, "qk_norm": preset.qk_norm,
        "pe_attn_head": preset.pe_attn_head, "attn_backend": "torch", "attn_mask_enabled": False,
    }  # fmt: skip
    mel = {"mel_spec_type": "vocos", "target_sample_rate": 24_000}
    (folder / "same.yaml").write_text(json.dumps({"model": {"backbone": "DiT", "arch": arch, "mel_spec": mel}}))
    voice = Voice(model, read_reference(*demo_reference(), model), make_vocoder("cpu"))
    import soundfile

    soundfile.write(folder / "reference.wav", voice.reference.audio.numpy(), 24_000)
    (folder / "reference.txt").write_text(voice.reference.text)


def our_server(folder: Path) -> None:
    from f5kit.serve import serve

    model = load_model(folder / "ours")
    reference = read_reference(folder / "reference.wav", (folder / "reference.txt").read_text(), model)
    server = serve(Voice(model, reference, make_vocoder("cpu")), port=0)
    print(server.url, flush=True)
    threading.Event().wait()


def upstream_server(folder: Path, port: int) -> None:
    """f5_tts/socket_server.py as it is, but for what it can't have here: torchaudio.load needs torchcodec, its vocoder
    comes from the Hub, and its config from a file among its own."""
    import soundfile

    from f5kit.audio import import_torchaudio

    torchaudio = import_torchaudio()
    torchaudio.load = lambda path: (torch.from_numpy(soundfile.read(path, dtype="float32")[0])[None], 24_000)
    import f5_tts
    from f5_tts import socket_server

    vocoder = make_vocoder("cpu")

    class Decoder:
        def decode(self, mel):
            return vocoder.head(vocoder.backbone(mel))

    socket_server.load_vocoder = lambda **given: Decoder()
    configs = Path(f5_tts.__path__[0]) / "configs"
    name = os.path.relpath(folder / "same", configs)
    processor = socket_server.TTSStreamingProcessor(
        name, str(folder / "model.safetensors"), str(folder / "vocab.txt"), str(folder / "reference.wav"),
        (folder / "reference.txt").read_text(),
    )  # fmt: skip
    print(f"port {port}", flush=True)
    socket_server.start_server("127.0.0.1", port, processor)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def beside_upstream(seconds: float, rounds: int, steps: int = 32) -> dict:
    """Rounds of ours and of upstream's in turns; 32 steps, for upstream's server has no other."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_weights(folder)
        me, port = str(Path(__file__).resolve()), free_port()
        with Child(me, "--ours", place) as ours, Child(me, "--upstream", place, str(port)) as theirs:
            askers = {"f5kit": (http_asker(ours.address, steps), 2), "upstream": (socket_asker(int(theirs.address)), 4)}
            rows = []
            for turn in range(rounds):
                for name, (ask, width) in askers.items():
                    took, asked = timed(lambda: load(ask, seconds), "cpu")  # noqa: B023
                    row = {"server": name, "round": turn, "seconds": took, **figures(asked, took, width)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    told = ("requests_per_second", "audio_seconds_per_second", "first_byte_p50", "first_byte_p95", "lost")
    medians = {
        name: {key: statistics.median(row[key] for row in rows if row["server"] == name) for key in told}
        for name in ("f5kit", "upstream")
    }
    return {"model": "structure of starter, random weights", "vocoder": "structure of Vocos, random weights",
            "steps": steps, "callers": CALLERS, "medians": medians, "rounds": rows}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="of the embedded voice")
    parser.add_argument("--alone", action="store_true", help="without upstream")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "serve.json"))
    parser.add_argument("--ours", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--upstream", nargs=2, metavar=("FOLDER", "PORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        return our_server(Path(given.ours))
    if given.upstream:
        return upstream_server(Path(given.upstream[0]), int(given.upstream[1]))
    record = circumstances("cpu")
    record["embedded"] = embedded(given.seconds, given.steps)
    print(json.dumps(record["embedded"]), flush=True)
    if not given.alone:
        record["versions"]["f5-tts"] = version("f5-tts")
        record["beside_upstream"] = beside_upstream(given.seconds, given.rounds)
    Path(given.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
