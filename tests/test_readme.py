"""The README: its snippets run, its commands exist, its figures are a recorded run's, its links lead somewhere."""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code, folder):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)


def test_the_python_snippet_trains_and_speaks(tmp_path):
    done = run(SNIPPETS[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hello.wav").stat().st_size > 1_000


def test_the_sweep_makes_one_table(dataset, tmp_path):
    shutil.copytree(dataset.folder, tmp_path / "runs" / "demo" / "data" / "my_voice")
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    done = run(SNIPPETS[1], tmp_path)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.strip().splitlines()[-3:]
    assert header.split() == ["learning", "rate", "loss", "before", "loss", "after"]
    (low, before, after), (high, before_too, _) = (map(float, row.split()) for row in rows)
    assert (low, high) == (0.001, 0.003)
    assert before == before_too > after


def test_the_speaking_snippet_speaks(tmp_path):
    done = run(SNIPPETS[2], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "evening.mp3").stat().st_size > 1_000 and done.stdout.count("s of sound") > 1


def test_the_serving_snippet_serves(tmp_path):
    done = run(SNIPPETS[3], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "served.flac").stat().st_size > 1_000 and "http://127.0.0.1:" in done.stdout


def test_there_are_no_snippets_that_no_test_runs():
    assert len(SNIPPETS) == 4


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE))))
def test_commands_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("program", "option"),
    [
        (["notebooks/run.py"], "--demo"),
        (["-m", "f5kit.convert"], "--to"),
        (["-m", "f5kit.launch"], "--processes"),
        (["-m", "f5kit.serve"], "--new-key"),
        (["-m", "f5kit.selfcheck"], "--minutes"),
    ],
    ids=["run", "convert", "launch", "serve", "selfcheck"],
)
def test_programs_help(program, option):
    done = subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert option in done.stdout


def test_figures_are_those_of_the_recorded_run():
    record = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    text = " ".join(README.split())
    minutes, again = record["seconds_in_all"] / 60, record["seconds_when_resumed"] / 60
    losses = record["losses"]
    assert f"took {minutes:.1f} minutes, and the second time {again:.1f} minutes" in text
    assert f"fell from {losses['start']:.2f} to {losses['end']:.2f}" in text
    assert f"reaches {record['loss_of_averages']:.2f}" in text
    recorded, before, after = (record["judged"][system] for system in ("recordings", "before", "after"))
    similar = [figures["similarity"]["value"] for figures in (before, after)]
    assert f"the speaker rose from {similar[0]:.2f} to {similar[1]:.2f}" in text
    assert f"got {after['wer']['value']:.2f} of the words wrong, and {recorded['wer']['value']:.2f} of the" in text


def test_preparation_is_as_fast_as_the_readme_says_and_as_it_must_be():
    record = json.loads((ROOT / "benchmarks" / "results" / "prepare.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    real_time = statistics.median(run["times_real_time"] for run in record["road"])
    memory = max(run["memory_above_libraries_mb"] for run in record["road"])
    reads, growth = record["cache"]["median"], record["bytes_per_further_clip"]
    assert f"{real_time:.0f} times real time, {memory:.0f} MB above the libraries" in README
    assert f"| {reads:,.0f} a second |" in README and f"| {growth / 1000:.1f} KB |" in README
    theirs = {key: statistics.median(run[key] for run in record["upstream"]) for key in record["upstream"][0]}
    assert f"in {theirs['seconds']:.2f} s |" in README
    assert f"| {theirs['read_clips_per_second']:.0f} a second, each decoded" in README
    assert min(run["times_real_time"] for run in record["road"]) >= 60 and memory < 1000 and reads >= 10_000
    assert [run["clips"] for run in record["rows"]] == [1_000, 10_000, 100_000] and growth < 10_000


def test_the_probe_named_as_many_as_the_readme_says():
    record = json.loads((ROOT / "benchmarks" / "results" / "probe_configs.json").read_text())
    assert f"named the right one {record['right']} times of {record['of']}" in " ".join(README.split())


def test_tables_are_those_of_the_records():
    command = [sys.executable, "benchmarks/tables.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for table in done.stdout.strip().split("\n\n"):
        assert table in README, f"the README has not this table:\n{table}"
    for name, words in (("starter", "sentences that it had not heard"), ("demo", "sentences of the demo's speaker")):
        judged = json.loads((ROOT / "benchmarks" / "results" / f"judge_{name}.json").read_text())
        count = sum(row["system"] == "recordings" for row in judged["sentences"])
        assert f"{count} {words}" in " ".join(README.split())


def test_the_runs_that_were_too_long():
    runs = json.loads((ROOT / "benchmarks" / "results" / "overfit.json").read_text())["runs"]
    held = sum(row["held"] and row["chosen"] != row["last"] for row in runs)
    assert f"{held} times of {len(runs)} it was the better one" in " ".join(README.split())


def test_the_memory_table_is_predicted_and_says_so():
    record = json.loads((ROOT / "benchmarks" / "results" / "memory_table.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys() and record["predicted"]
    text = " ".join(README.split())
    assert "Predicted, [not measured](benchmarks/results/memory_table.json)" in text
    assert "when clips are 10 s at most" in text and record["settings"]["longest_clip_frames"] == 938


def test_the_picker_answers_as_soon_as_the_readme_says_and_as_it_must():
    answers = json.loads((ROOT / "benchmarks" / "results" / "memory_table.json").read_text())["answer_seconds"]
    assert len(answers) == 11 and max(answers.values()) < 5
    assert f"answered in {max(answers.values()):.1f} s at most" in " ".join(README.split())


def test_eight_bit_states_cost_as_little_as_the_readme_says():
    record = json.loads((ROOT / "benchmarks" / "results" / "adam8bit.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    assert all(len(curve["updates"]) == 300 for curve in record["curves"].values())
    share = 100 * record["differences"]["largest_of_updates"]
    assert share < 2 and f"stayed within {share:.2f} % of AdamW's" in " ".join(README.split())


def test_updates_are_as_fast_as_they_must_be():
    record = json.loads((ROOT / "benchmarks" / "results" / "train_step.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys() and "bf16" in record["hardware"]
    ratios = {row["preset"]: row["ratios"] for row in record["rows"]}
    assert ratios["F5TTS_v1_Small"]["f5kit bf16 to upstream fp32"]["median"] >= 1.9
    assert ratios["F5TTS_v1_Base"]["f5kit bf16 to upstream fp32"]["median"] >= 2.0
    assert all(row["f5kit bf16 to upstream bf16"]["median"] >= 1.0 for row in ratios.values())
    for row in record["rows"]:
        ours, theirs = (row["memory_bytes"][f"{who} bf16"] / 1e9 for who in ("f5kit", "upstream"))
        told = f"{ours:.2f} GB at most for v1_Small" if "Small" in row["preset"] else f"{ours:.2f} for v1_Base"
        assert f"{told}, upstream's {theirs:.2f}" in " ".join(README.split()) and ours <= theirs


def test_speaking_is_as_fast_as_it_must_be():
    record = json.loads((ROOT / "benchmarks" / "results" / "speak.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    assert len(record["rows"]) == 12 and all(row["ratio"] >= 1.5 for row in record["rows"])
    change = 100 * max(row["mel_change"] for row in record["rows"])
    assert f"changes these mels by {change:.1f} % at most" in " ".join(README.split())


def test_words_survive_half_precision_and_the_borders_of_chunks():
    record = json.loads((ROOT / "benchmarks" / "results" / "speak_words.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    text, words, difference = " ".join(README.split()), record["words"], record["words"]["wer_difference"]
    wrong, long, ends = words["wrong"], words["long_text"], words["ends"]
    assert difference["low"] <= 0 <= difference["high"]
    assert f"{wrong['fp32']} of {words['words']} words wrong in fp32 and {wrong['bf16']} in bf16" in text
    assert f"Said as one text of {long['chunks']} chunks" in text and long["words"] >= 200
    joined, alone = long["in one"], long["alone"]
    assert f"they have {joined['words_wrong']} words wrong, and {alone['words_wrong']} said one by one" in text
    assert joined["words_wrong"] < 1.05 * alone["words_wrong"] and long["lost_only_in_one"] <= long["lost_only_alone"]
    lost = f"{long['lost_only_in_one']} were heard only one by one and {long['lost_only_alone']} only in the one text"
    assert f"Of the {2 * long['borders']} words at the chunks' borders {lost}; none was added there" in text
    assert joined["added_at_borders"] == [] and joined["doubled_at_borders"] == 0
    whole, unknown = ends["in one"]["as written"], ends["in one"]["a word not in the dictionary"]
    assert whole + unknown == long["chunks"]
    assert f"all {whole} chunks whole whose words it knows ({unknown} hold" in text
    noticed = sum(ends["spoilt"]["noticed"].values())
    assert f"it says so in {noticed} of {4 * whole} cases" in text and noticed > 3 * whole
    assert max(record["first_sound"]) <= 12 and f"takes {max(record['first_sound']):.1f} s at most" in text


def test_the_server_under_load_did_what_the_readme_says():
    record = json.loads((ROOT / "benchmarks" / "results" / "serve.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= record.keys()
    load, text = record["embedded"], " ".join(README.split())
    assert (load["callers"], load["lost"], load["wrong"]) == (8, 0, 0) and load["seconds"] >= 60
    assert f"{load['requests']} requests, none lost and none unlike what its seed says alone" in text
    assert f"first sound came after {load['first_byte_p50']:.1f} s in the median" in text
    assert f"({load['first_byte_p95']:.1f} s in the slowest twentieth)" in text
    assert f"memory grew by {load['memory_mb']['growth']:.1f} MB" in text and load["memory_mb"]["growth"] < 5


def test_links_to_files_lead_there():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
