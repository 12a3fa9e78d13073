"""f5kit's token ids against the f5-tts package's, live: random texts, its published vocabulary.

    make parity                                       in an environment of its own
    python tests/parity/compare_text.py --seed 7      the run that printed seed 7
    python tests/parity/compare_text.py --golden      write tests/golden_text.json anew

The char tokenizer has a vocabulary of the texts' own characters, as upstream makes one from a dataset; pinyin and
custom have the published one. One difference is deliberate and has a row with both numbers: upstream puts spaces
inside words, f5kit never does. There, f5kit's ids must be upstream's without those spaces. Upstream's id 0 for a
token that its vocabulary lacks is the space's: texts are made of tokens that it has. Exits 1 when anything else
differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import unicodedata
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from f5kit.audio import import_torchaudio
from f5kit.text import Tokenizer, byte_vocab, normalise

import_torchaudio()  # f5_tts imports it, and beside a CPU build of torch a plain import fails
from f5_tts.model.utils import (  # noqa: E402
    convert_char_to_pinyin,
    get_tokenizer,
    list_str_to_idx,
    list_str_to_tensor,
)

GOLDEN = Path(__file__).parents[1] / "golden_text.json"
VOCABULARY = files("f5_tts").joinpath("infer/examples/vocab.txt")
TEXTS = 1_000  # a row
KINDS = ("english", "chinese", "digits", "mixed", "punctuation")

ENGLISH = """the of and to in is was for that with he her on at by from they we don't it's well-known twenty-one
U.S. e-mail A.M. Mr. o'clock rock'n'roll New York iPhone GPU COVID-19 I a""".split()
CHINESE = """今天 天气 很好 我们 一起 去 银行 还 钱 重新 重要 音乐 快乐 一个 不是 不要 了解 吃了
北京 大学 长大 银 行走 都 首都 中国 人民 你好 世界 朋友 们 得到 跑得快 觉得 睡觉 小孩 老虎 展览 馆
领导 洗澡 打扫 雨伞 水果 数据 处理 的 地 得 着""".split()
NUMBERS = "0 7 12 2024 3.14 1,000 50% 10:30 007 1/2 $5 20-30 #1 v2.0 4G 12.5kg A股 T恤 C++ AT&T c#".split()
MARKS = list(",.!?;:'\"()-…—/&") + ["...", "--", "，", "。", "！", "？", "、", "《", "》", "“", "”", "’"]
ACCENTED = """français niñera straße thường été über mañana señor Zürich garçon çok şimdi řeka żółw naïve café résumé
Ærø crème brûlée ngày người việt größer""".split()


def random_text(rng: random.Random, kind: str) -> str:
    """Some words of a kind, with spaces between Latin words and marks anywhere."""
    words = {"english": ENGLISH, "chinese": CHINESE, "digits": NUMBERS + ENGLISH[:8], "accented words": ACCENTED}.get(
        kind, ENGLISH + CHINESE + NUMBERS
    )
    text = ""
    for _ in range(rng.randint(1, 12)):
        if text and (rng.random() < 0.2 or kind == "punctuation"):
            text += rng.choice(MARKS)
        loose = kind in ("chinese", "mixed", "punctuation") and rng.random() < 0.6
        text += ("" if loose or not text else " ") + rng.choice(words)
    return normalise(text, "published")


def upstream_ids(text: str, tokenizer: str, vocabulary: dict[str, int] | None) -> list[int]:
    """Ids as upstream's training makes them from a text."""
    if tokenizer == "byte":
        return list_str_to_tensor([text])[0].tolist()
    tokens = [list(text)] if tokenizer == "char" else convert_char_to_pinyin([text])
    return list_str_to_idx(tokens, vocabulary)[0].tolist()


def known(text: str, tokenizer: str, vocabulary: dict[str, int] | None) -> bool:
    """Whether upstream has an id for each token."""
    if tokenizer == "byte":
        return True
    tokens = text if tokenizer == "char" else convert_char_to_pinyin([text])[0]
    return all(token in vocabulary for token in tokens)


def spaces_inside_words(text: str) -> list[str]:
    """Upstream's tokens, with "" for each space that it puts between two letters of one word."""
    tokens, place = convert_char_to_pinyin([text])[0], 0
    for i, token in enumerate(tokens):
        if text[place : place + 1] == token:
            place += 1
        elif token == " " and 0 < place < len(text) and _accented(text[place - 1]) and text[place].isalnum():
            tokens[i] = ""
        elif token != " ":
            place += 1  # an ideograph's pinyin, or a mark made plain
    return tokens


def _accented(character: str) -> bool:
    letter = character.isalnum() or unicodedata.category(character)[0] == "M"
    return letter and not character.isascii() and unicodedata.east_asian_width(character) not in "WF"


def compare(kind: str, tokenizer: str, rng: random.Random, vocabulary: dict[str, int] | None) -> dict:
    """How many of some random texts have equal ids, and ids equal but for spaces inside words."""
    ours = Tokenizer(list(vocabulary) if vocabulary else byte_vocab(), tokenizer, "published")
    found = {"texts": 0, "ids": 0, "equal": 0, "without": 0, "spaces": 0}
    while found["texts"] < TEXTS:
        text = random_text(rng, kind)
        if not known(text, tokenizer, vocabulary):
            continue
        theirs, mine = upstream_ids(text, tokenizer, vocabulary), ours.encode(text)
        inside = spaces_inside_words(text) if tokenizer in ("pinyin", "custom") else []
        without = [vocabulary[token] for token in inside if token] if inside else theirs
        found["texts"] += 1
        found["ids"] += len(theirs)
        found["equal"] += mine == theirs
        found["without"] += mine == without
        found["spaces"] += inside.count("")
    return found


def write_golden(vocabulary: dict[str, int]) -> None:
    """Some texts with upstream's ids, and the tokens they name, for the tests that run without the package."""
    rng = random.Random(0)
    texts = ["well-known (hello) they're 50%off...", "C++ AT&T vC#; ok", "你好hello世界 2024年 A股", "重要的，行走了。"]
    for kind in KINDS:
        texts += [random_text(rng, kind) for _ in range(8)]
    texts = [t for t in texts if known(t, "pinyin", vocabulary) and "" not in spaces_inside_words(t)]
    tokens = list(vocabulary)
    rows = [{"text": t, "ids": upstream_ids(t, "pinyin", vocabulary)} for t in texts]
    used = {i: tokens[i] for i in sorted({i for row in rows for i in row["ids"]})}
    broken = {word: "".join(convert_char_to_pinyin([word])[0]) for word in ACCENTED}
    words = {word: theirs for word, theirs in broken.items() if word != theirs}
    content = {"f5-tts": version("f5-tts"), "size": len(tokens), "tokens": used, "texts": rows, "words": words}
    lines = json.dumps(content, ensure_ascii=False).replace("}, {", "},\n{").replace('"texts"', '\n"texts"')
    GOLDEN.write_text(lines + "\n", encoding="utf-8")
    print(f"{GOLDEN}: {len(rows)} texts, {len(words)} words")


def read_vocabulary(path) -> dict[str, int]:
    """A vocab.txt as upstream's loader reads it, which must be how f5kit's does."""
    vocabulary, size = get_tokenizer(str(path), "custom")
    assert vocabulary == {token: i for i, token in enumerate(Tokenizer.load(path, "custom").vocab)} and size > 0
    return vocabulary


def own_characters() -> dict[str, int]:
    """Every character that the random texts are made of."""
    characters = {*"".join([*ENGLISH, *CHINESE, *NUMBERS, *MARKS])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        Tokenizer([" ", *sorted(characters)]).save(path)
        return read_vocabulary(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--golden", action="store_true", help="write the golden file from this package and stop")
    options = parser.parse_args()
    vocabulary = read_vocabulary(VOCABULARY)
    if options.golden:
        write_golden(vocabulary)
        return 0
    rng, broken = random.Random(options.seed), 0
    print(f"f5-tts {version('f5-tts')}, ids of {TEXTS:,} texts a row, seed {options.seed}")
    print(f"{'tokenizer':<10} {'texts':<16} {'ids':>8} {'unequal texts':>14}  ok")
    vocabularies = {"char": own_characters(), "pinyin": vocabulary, "custom": vocabulary, "byte": None}
    for tokenizer, its_vocabulary in vocabularies.items():
        for kind in KINDS:
            found = compare(kind, tokenizer, rng, its_vocabulary)
            differing = found["texts"] - found["equal"]
            broken += differing > 0
            print(f"{tokenizer:<10} {kind:<16} {found['ids']:>8,} {differing:>14}  {'NO' if differing else 'yes'}")
    found = compare("accented words", "pinyin", rng, vocabulary)
    differing = found["texts"] - found["without"]
    broken += differing > 0
    print("deliberate: spaces put inside words of accented Latin")
    print(f"  upstream {found['spaces']:,} in {found['texts']:,} texts, f5kit 0; {differing} texts differ in more")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
