# ruff: noqa: E501  (lists of words)
"""Everyday English for the starter corpus: what people say to each other, with numbers, days and places in words.

Written for f5kit and given to the public domain (CC0), so that the corpus is not all speeches and whales.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from num2words import num2words

PATTERNS = """
Good {part}, {name}. | Good {part}. | Hello, {name}! | Hello there. | How are you today? | Thank you very much. |
Yes, please. | No, thank you. | See you on {day}. | See you {when}. | Please wait here. | I do not know. | Never mind. |
What time is it? | It is {hour} o'clock. | It is half past {hour}. | The train leaves at {hour} {minute}. |
My name is {name}. | This is my {kin}, {name}. | Have you seen {name}? | Where is the {place}? | Can you hear me? |
The {place} is closed on {day}. | The {place} opens at {hour} in the {part}. | We met {name} at the {place}. |
I would like {number} {things}, please. | She bought {number} {things} at the {place}. | That costs {number} dollars. |
There are {number} {things} on the table. | He is {number} years old. | Turn left at the {place}. | Please call me {when}. |
The {thing} is {colour}. | My {kin} has a {colour} {thing}. | Is this {thing} yours? | I left the {thing} at the {place}. |
It will {weather} {when}. | Did it {weather} on {day}? | The {thing} is too {quality} for me. | What a {quality} {thing}! |
In {month}, the days are {quality}. | Her birthday is on the {ordinal} of {month}. | The answer is {number}. |
{number}, {number}, {number}. | {name} and {name} live near the {place}. | Could you open the {thing}, {name}? |
My {kin} works at the {place}. | We walked from the {place} to the {place}. | Close the {thing} before you go. |
I have read {number} books this year. | Would you like some {food}? | The {food} tastes {quality}. |
We had {food} and {food} for dinner. | Do you want {food} or {food}? | {day}, {day} and {day}. | {colour} | {name} | {number} |
{thing} | {food} | {weather} | {quality} | {month} | {place} | {kin} | {day}
"""
WORDS = {
    "part": "morning afternoon evening night",
    "name": "Anna Peter Mary John Sarah David Emma Robert Alice George Laura Henry Julia Martin Susan Paul Helen Frank",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "when": "tomorrow,tonight,next week,this afternoon,in the morning,on Friday,later today,again soon,after lunch",
    "hour": "one two three four five six seven eight nine ten eleven twelve",
    "minute": "five,ten,fifteen,twenty,twenty five,thirty,forty,forty five,fifty",
    "kin": "mother father sister brother uncle aunt cousin daughter son friend neighbour teacher doctor",
    "place": "market,station,school,library,hospital,bridge,river,garden,church,bakery,post office,harbour,museum,park,bank",
    "things": "apples,tickets,letters,chairs,cups of tea,loaves of bread,pencils,oranges,bottles,flowers,stamps,eggs,keys",
    "thing": "door window book coat hat chair lamp clock bicycle letter picture basket box table mirror umbrella blanket knife",
    "colour": "red green blue yellow black white brown grey orange purple pink silver",
    "weather": "rain snow thunder freeze hail",
    "quality": "warm cold long short quiet strange heavy bright sweet bitter small large wonderful terrible expensive beautiful",
    "month": "January February March April May June July August September October November December",
    "food": "bread,cheese,soup,fish,rice,butter,coffee,milk,honey,apple pie,potatoes,chicken,salad,chocolate,water",
}


def phrases(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(phrase, "phrases.py") for ever."""
    patterns = [pattern.strip() for pattern in " ".join(PATTERNS.split()).split("|")]
    lists = {name: words.split("," if "," in words else None) for name, words in WORDS.items()}
    while True:
        text = rng.choice(patterns)
        while "{" in text:
            before, _, rest = text.partition("{")
            name, _, after = rest.partition("}")
            text = before + _word(name, lists, rng) + after
        yield text[0].upper() + text[1:], "phrases.py"


def _word(name: str, lists: dict[str, list[str]], rng: random.Random) -> str:
    if name == "number":
        return num2words(rng.choice((rng.randint(2, 20), rng.randint(2, 100), rng.randint(2, 3000)))).replace(" and", "")
    if name == "ordinal":
        return num2words(rng.randint(1, 31), to="ordinal")
    return rng.choice(lists[name])
