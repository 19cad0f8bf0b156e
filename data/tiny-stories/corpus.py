"""Generate the tiny-stories corpus: short children's stories, questions about them, and chats.

Every document comes from its own seed, `(seed, index)`, so that any part of the corpus can be made alone,
in any order and by any number of workers. Only `random.Random(int).random()` is used, whose sequence Python
keeps from version to version; nothing depends on hashes or on the order of a set. The text of each document
begins with `<|bos|>`; a story ends with `<|eos|>`, a chat turn with `<|end|>`.

    python corpus.py --stories 1000 --seed 1 --out corpus.txt     # prints the SHA-256 of what it wrote
    python corpus.py --frames                                     # how many sentence frames the grammar has
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import grammar

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, SYSTEM, USER, ASSISTANT, END, EOS)

# The split between training and held-out documents is by seed.
TRAIN_SEED, HELD_OUT_SEED = 1, 2

T = TypeVar("T")
Slots = dict[str, str]
Fact = tuple[str, str]  # a question and its answer


class Dice:
    """Choices that are the same on every machine and Python version."""

    def __init__(self, seed: int, index: int) -> None:
        self._random = random.Random(seed * 2**40 + index).random

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return int(self._random() * n)

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self._random() < p

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """n different items, in the order drawn."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(n)]

    def lean(self, items: Sequence[T], favourite: int = 0) -> T:
        """One of the items, one of them (counted round and round) at least twice as likely as any other.

        If all were equally likely, so would be the model's best and second best next token, and the least
        rounding would turn a greedy continuation into another. So each choice in a story has a favourite.
        """
        n = len(items)
        extra = min(0.35, 1.2 / n)
        x = self._random()
        return items[favourite % n] if x < extra else items[int((x - extra) / (1 - extra) * n)]

    def lean_sample(self, items: Sequence[T], n: int, favourite: int = 0) -> list[T]:
        """n different items, in the order drawn, each drawing with a favourite."""
        rest = list(items)
        drawn = []
        for _ in range(n):
            drawn.append(self.lean(rest, favourite))
            rest.remove(drawn[-1])
        return drawn


# --- The small language of tellings --------------------------------------------------------------------

# A parsed telling: text, a slot's name in braces, or a tuple of alternatives, in order.
Node = tuple[str, object]


@cache
def parse(telling: str) -> tuple[Node, ...]:
    """Parse a telling once: ("text", s), ("slot", name) and ("choice", alternatives) in order."""
    nodes, end = _parse_sequence(telling, 0, stop="")
    if end != len(telling):
        raise ValueError(f"telling has a stray {telling[end]!r} at {end}: {telling!r}")
    return nodes


def _parse_sequence(telling: str, i: int, stop: str) -> tuple[tuple[Node, ...], int]:
    """Nodes from position i up to one of the characters in `stop`."""
    nodes: list[Node] = []
    while i < len(telling) and telling[i] not in stop:
        if telling[i] == "[":
            alternatives = []
            while telling[i] != "]":
                alternative, i = _parse_sequence(telling, i + 1, stop="|]")
                if i == len(telling):
                    raise ValueError(f"telling has an open [: {telling!r}")
                alternatives.append(alternative)
            nodes.append(("choice", tuple(alternatives)))
            i += 1
        elif telling[i] == "{":
            end = telling.index("}", i)
            nodes.append(("slot", telling[i + 1 : end]))
            i = end + 1
        else:
            end = i
            while end < len(telling) and telling[end] not in "[{" + stop:
                end += 1
            nodes.append(("text", telling[i:end]))
            i = end
    return tuple(nodes), i


def slot_value(name: str, slots: Slots) -> str:
    """The value of a slot, with its article or capital letter if the name asks for one."""
    if name.startswith(("a:", "A:")):
        value = slots[name[2:]]
        return name[0] + ("n " if value[0] in "aeiou" else " ") + value
    if name.startswith(("the:", "The:")):
        noun = slots[name[4:]].removeprefix("a ").removeprefix("an ").removeprefix("the ")
        return f"{name[:3]} {noun}"
    if name.startswith("^"):
        return capital(slots[name[1:]])
    return slots[name]


def capital(text: str) -> str:
    """The text with its first letter as a capital."""
    for i, character in enumerate(text):
        if character.isalpha():
            return text[:i] + character.upper() + text[i + 1 :]
    return text


def tell(telling: str, slots: Slots, dice: Dice) -> str:
    """One way of saying a telling, with the slots filled in."""
    return "".join(_tell(parse(telling), slots, dice)).replace("  ", " ").rstrip(" ")


def _tell(nodes: tuple[Node, ...], slots: Slots, dice: Dice) -> Iterator[str]:
    """The pieces of a parsed telling."""
    for kind, content in nodes:
        if kind == "text":
            yield content  # type: ignore[misc]
        elif kind == "slot":
            yield slot_value(content, slots)  # type: ignore[arg-type]
        else:
            yield from _tell(dice.lean(content), slots, dice)  # type: ignore[arg-type]


def ways(nodes: tuple[Node, ...]) -> int:
    """In how many ways a parsed telling can be said, its slots left open."""
    total = 1
    for kind, content in nodes:
        if kind == "choice":
            total *= sum(map(ways, content))  # type: ignore[call-overload]
    return total


# --- A story -------------------------------------------------------------------------------------------


class Story(NamedTuple):
    """A story, the words that it used, the questions it answers, and its plot's name."""

    text: str
    slots: Slots
    facts: tuple[Fact, ...]
    plot: str


PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}


def make_story(dice: Dice) -> Story:
    """Draw the characters, the plot and its words, and tell it."""
    slots: Slots = {}
    is_child = dice.chance(0.6)
    mood = _draw_hero(slots, is_child, dice)
    names = [name for name, plot in grammar.PLOTS.items() if is_child or plot.cast == "any"]
    name = dice.lean(names, 5 * mood)
    plot = grammar.PLOTS[name]
    if plot.friend != "none":
        _draw_friend(slots, is_child, plot.friend, dice)
    _draw_plot_words(slots, plot, is_child, mood, dice)
    text, facts = _tell_story(name, plot, slots, dice)
    return Story(text, slots, facts, name)


def _set_pronouns(slots: Slots, prefix: str, he: str) -> None:
    """Pronouns of the hero (prefix "") or of the other character (prefix "f"), also with a capital."""
    for key, word in zip(("he", "him", "his", "himself"), PRONOUNS[he], strict=True):
        slots[prefix + key] = word
        slots[(prefix + key).capitalize()] = word.capitalize()


def _draw_hero(slots: Slots, is_child: bool, dice: Dice) -> int:
    """Who the story is about, where they live and what they love.

    Returns the hero's mood, 0 to 3: what the story's favourite plot and words depend on. The name tells it,
    so that a reader who looks back at the name can foresee a little of the story.
    """
    if is_child:
        he = dice.lean(("she", "he"))
        names: tuple[str, ...] = grammar.GIRLS if he == "she" else grammar.BOYS
        slots["species"] = "girl" if he == "she" else "boy"
    else:
        names = grammar.ANIMAL_NAMES
    slots["h"] = dice.lean(names)
    mood = names.index(slots["h"]) % 4
    if is_child:
        slots["town"], slots["paint"] = dice.lean(grammar.TOWNS, 3 * mood), dice.lean(grammar.PAINTS, mood)
        slots["home"] = tell(dice.lean(grammar.HOMES, mood), slots, dice)
    else:
        he = _pronoun_of_animal(slots["h"])
        slots["species"] = dice.lean(tuple(grammar.ANIMALS), 3 * mood)
        den = dice.lean(grammar.ANIMALS[slots["species"]])
        slots["home"] = f"{den} {dice.lean(grammar.LANDSCAPES, 2 * mood)}"
    _set_pronouns(slots, "", he)
    slots["kind"] = dice.lean(("", "little ", "young ")) + slots["species"]
    slots["trait"] = dice.lean(grammar.TRAITS, 4 * mood)
    slots["like"], slots["like2"] = dice.lean_sample(grammar.LIKES, 2, 4 * mood)
    return mood


def _pronoun_of_animal(name: str) -> str:
    """The animals' names alternate, so that each is always a he or always a she."""
    return ("he", "she")[grammar.ANIMAL_NAMES.index(name) // 4 % 2]


def _draw_friend(slots: Slots, is_child: bool, friend: str, dice: Dice) -> None:
    """The other character: one of the hero's age (peer), or an older one."""
    if friend in ("elder", "kin") or (friend == "any" and dice.chance(0.35)):
        elders = grammar.ELDERS if is_child else grammar.ANIMAL_ELDERS
        kin = [elder for elder in elders if elder[1].startswith("{his}")]
        slots["f"], intro, fhe = dice.lean(kin if friend == "kin" else elders)
        _set_pronouns(slots, "f", fhe)
        slots["fplain"] = tell(intro.rstrip(","), slots, dice)
        slots["fintro"] = tell(intro, slots, dice)
        return
    # Mostly of the other sex: then every "he" and "she" is clear.
    fhe = slots["he"] if dice.chance(0.2) else ("she" if slots["he"] == "he" else "he")
    if is_child:
        names: tuple[str, ...] = grammar.GIRLS if fhe == "she" else grammar.BOYS
        fkind = "girl" if fhe == "she" else "boy"
    else:
        names = tuple(name for name in grammar.ANIMAL_NAMES if _pronoun_of_animal(name) == fhe)
        fkind = dice.lean(tuple(grammar.ANIMALS))
    _set_pronouns(slots, "f", fhe)
    slots["f"] = dice.lean([name for name in names if name != slots["h"]])
    slots["fkind"] = fkind
    slots["fintro2"] = tell("{a:fkind} named {f}", slots, dice)
    slots["fintro"] = slots["fintro2"] if dice.chance(0.35) else tell("{his} friend {f}", slots, dice)


def _draw_plot_words(slots: Slots, plot: grammar.Plot, is_child: bool, mood: int, dice: Dice) -> None:
    """Fill the plot's own slots."""
    weather = dice.lean(plot.weather, mood)
    words, sentences = grammar.WEATHER[weather]
    slots["skyword"] = dice.lean(words)
    slots["sky"] = tell(dice.lean(sentences), slots, dice)
    slots["daypart"] = dice.lean(("morning", "afternoon", "day"))
    for key, values in plot.slots.items():
        if key in ("spot*3", "outside*2"):
            places: tuple[str, ...] = grammar.WILD_SPOTS
            if is_child:
                places = grammar.OUTDOOR_SPOTS + (grammar.INDOOR_SPOTS if key == "spot*3" else ())
            values = places
        if "*" in key:
            name, count = key.split("*")
            for i, value in enumerate(dice.lean_sample(values, int(count), 3 * mood), start=1):
                slots[f"{name}{i}"] = value
        elif "," in key:
            for name, value in zip(key.split(","), dice.lean(values, 3 * mood), strict=True):
                slots[name] = tell(value, slots, dice)
        else:
            slots[key] = tell(dice.lean(values, 3 * mood), slots, dice)
    if "guess" in slots:
        slots["guess2"] = slots["guess"].removeprefix("a ")


def _tell_story(name: str, plot: grammar.Plot, slots: Slots, dice: Dice) -> tuple[str, tuple[Fact, ...]]:
    """The story's text and the questions that it answers."""
    opening, told = _tell_opening(name, plot, slots, dice)
    facts = [*grammar.ABOUT_HERO, *plot.facts, *told]
    detail = dice.lean((0.1, 0.4, 0.8))
    beats = [beat for beat in plot.beats if not beat.startswith("?") or dice.chance(detail)]
    middle = [capital(tell(beat.removeprefix("?"), slots, dice)) for beat in beats]
    if dice.chance(0.3):
        # Who has slept at the end of the plot does not go to bed again.
        in_bed = name in ("noise", "sleep")
        closers = [closer for closer in grammar.CLOSERS if not (in_bed and "night" in closer)]
        middle[-1] += " " + tell(dice.lean(closers), slots, dice)
    if dice.chance(0.2):  # in paragraphs
        turn = 2 + dice.below(len(middle) - 3)
        parts = [opening, " ".join(middle[:turn]), " ".join(middle[turn:])]
        return "\n".join(parts), tuple(facts)
    return " ".join([opening, *middle]), tuple(facts)


def _tell_opening(name: str, plot: grammar.Plot, slots: Slots, dice: Dice) -> tuple[str, list[Fact]]:
    """The sentences before the plot, and the questions that only they answer. Sets the slot `when`."""
    has_when = any("{when}" in beat for beat in plot.beats)
    stamped = has_when and dice.chance(0.35)
    if stamped:
        slots["stamp"] = tell("One {skyword} {daypart}", slots, dice)
        intro = dice.lean(grammar.STAMPED_INTROS)
        when: tuple[str, ...] = grammar.LATER_WHENS
    else:
        # A newcomer is not someone whom everyone knows.
        intros = [intro for intro in grammar.INTROS if name != "new" or not intro.startswith("Everyone")]
        intro = dice.lean(intros)
        when = grammar.WHENS
    slots["when"] = tell(dice.lean(when), slots, dice)
    slots["when"] += " " * bool(slots["when"])
    first = capital(tell(intro, slots, dice))
    sentences = [first]
    if slots["like"] not in first and dice.chance(0.3):
        sentences.append(tell(dice.lean(grammar.LIKE_LINES), slots, dice))
    if stamped and dice.chance(0.4):
        sentences.insert(1, slots["sky"])
    if "f" in slots and not any("{fintro" in beat for beat in plot.beats):
        lines: tuple[str, ...] = grammar.PEER_INTROS if "fkind" in slots else grammar.ELDER_INTROS
        sentences.append(tell(dice.lean(lines), slots, dice))
    text = " ".join(sentences)
    told = []
    if slots["home"].lower() in text.lower():
        told.append(grammar.ABOUT_HOME)
    if slots["like"] in text:
        told.append(grammar.ABOUT_LIKE)
    if stamped and f"{slots['skyword']} {slots['daypart']}" in text:
        told.append(grammar.ABOUT_SKY)
    return text, told


# --- Documents -----------------------------------------------------------------------------------------


def chat(turns: Sequence[tuple[str, str]], dice: Dice) -> str:
    """A conversation in the chat template's form, sometimes with a system message."""
    text = BOS
    if dice.chance(0.15):
        text += SYSTEM + dice.pick(grammar.SYSTEMS) + END
    for user, assistant in turns:
        text += f"{USER}{user}{END}{ASSISTANT}{assistant}{END}"
    return text


def ask_for(story: Story, dice: Dice) -> str:
    """A request for this story."""
    requests = grammar.REQUESTS if "f" in story.slots else grammar.SOLO_REQUESTS
    slots = dict(story.slots)
    slots["about"] = tell(dice.pick(grammar.PLOTS[story.plot].about), slots, dice)
    return tell(dice.pick(requests), slots, dice)


def ask_about(story: Story, count: int, dice: Dice) -> list[Fact]:
    """Questions about this story with their answers."""
    return [
        (capital(tell(question, story.slots, dice)), capital(tell(answer, story.slots, dice)))
        for question, answer in dice.sample(story.facts, count)
    ]


def story_document(dice: Dice) -> str:
    """A story by itself."""
    return BOS + make_story(dice).text + EOS


def request_document(dice: Dice) -> str:
    """The user asks for a story, and may then ask about it, or for another."""
    story = make_story(dice)
    turns = [(ask_for(story, dice), story.text)]
    if dice.chance(0.3):
        turns += ask_about(story, 1 + dice.below(2), dice)
    if dice.chance(0.2):
        another = make_story(dice)
        turns.append((ask_for(another, dice), another.text))
        turns += ask_about(another, dice.below(2), dice)
    if dice.chance(0.1):
        user, assistant = dice.pick(grammar.SMALL_TALK)
        turns.insert(dice.pick((0, len(turns))), (tell(user, {}, dice), assistant))
    return chat(turns, dice)


def question_document(dice: Dice) -> str:
    """The user gives a story and asks about it."""
    story = make_story(dice)
    (first, answer), *rest = ask_about(story, 1 + dice.below(3), dice)
    slots = {"story": story.text, "question": first}
    return chat([(tell(dice.pick(grammar.ASKS), slots, dice), answer), *rest], dice)


def facts_document(dice: Dice) -> str:
    """Who has what, where things are, small sums, words to say again: one or a few of them in a chat."""
    makers = (own_item, own_item, put_item, put_item, add_item, repeat_item)
    return chat([dice.pick(makers)(dice) for _ in range(1 + dice.below(4))], dice)


def own_item(dice: Dice) -> tuple[str, str]:
    """Two to four people with a thing each."""
    count = 2 + dice.below(3)
    people = [
        {"p": p, "thing": thing, "colour": colour}
        for p, thing, colour in zip(
            dice.sample(grammar.GIRLS + grammar.BOYS, count),
            dice.sample(grammar.SMALL_THINGS, count),
            dice.sample(grammar.COLOURS, count),
            strict=True,
        )
    ]
    asked = dice.pick(people)
    question, answer = dice.pick(grammar.OWN_FACTS)
    sentences = [tell(grammar.OWN, person, dice) for person in people]
    return " ".join([*sentences, tell(question, asked, dice)]), tell(answer, asked, dice)


def put_item(dice: Dice) -> tuple[str, str]:
    """Two or three people put things somewhere; one of the things may be moved by another."""
    count = 2 + dice.below(2)
    spots = dice.sample(grammar.INDOOR_SPOTS + grammar.OUTDOOR_SPOTS, count + 1)
    people = [
        {"p": p, "thing": thing, "spot": spot}
        for p, thing, spot in zip(
            dice.sample(grammar.GIRLS + grammar.BOYS, count),
            dice.sample(grammar.SMALL_THINGS, count),
            spots[:count],
            strict=True,
        )
    ]
    sentences = [tell(grammar.PUT, person, dice) for person in people]
    if dice.chance(0.4):
        moved = dice.pick(people)
        mover = dice.pick(people)["p"]
        moved["spot"] = spots[count]
        sentences.append(tell(grammar.MOVE, {**moved, "p": mover}, dice))
    asked = dice.pick(people)
    question, answer = dice.pick(grammar.PUT_FACTS)
    return " ".join([*sentences, tell(question, asked, dice)]), tell(answer, asked, dice)


def add_item(dice: Dice) -> tuple[str, str]:
    """A sum with a total of at most ten."""
    n, m = 2 + dice.below(5), 1 + dice.below(4)
    p, q = dice.sample(grammar.GIRLS + grammar.BOYS, 2)
    slots = {"p": p, "q": q, "things": dice.pick(grammar.SMALL_THINGS) + "s"}
    slots |= {key: grammar.NUMBERS[value] for key, value in (("n", n), ("m", m), ("total", n + m))}
    question, answer = grammar.ADD_FACT
    return tell(grammar.ADD + " " + question, slots, dice), tell(answer, slots, dice)


def repeat_item(dice: Dice) -> tuple[str, str]:
    """Two to six coloured things to say again in the same order."""
    count = 2 + dice.below(5)
    colours = [dice.pick(grammar.COLOURS) for _ in range(count)]
    things = dice.sample(grammar.SMALL_THINGS, count)
    words = ", ".join(f"{colour} {thing}" for colour, thing in zip(colours, things, strict=True))
    return tell(dice.pick(grammar.REPEATS), {"words": words}, dice), capital(words) + "."


# document maker -> its share of the corpus
SHARES = ((story_document, 0.60), (request_document, 0.14), (question_document, 0.18), (facts_document, 0.08))


def document(seed: int, index: int) -> str:
    """Document number `index` of the corpus `seed`."""
    dice = Dice(seed, index)
    x = dice._random()
    for make, share in SHARES:
        if x < share:
            return make(dice)
        x -= share
    return story_document(dice)


def documents(seed: int, start: int, stop: int) -> Iterator[str]:
    """Documents `start` to `stop - 1`."""
    return (document(seed, index) for index in range(start, stop))


def corpus_sha256(seed: int, count: int) -> str:
    """The SHA-256 that `corpus.py --seed SEED --stories COUNT` prints."""
    digest = hashlib.sha256()
    for text in documents(seed, 0, count):
        digest.update((text + "\n").encode())
    return digest.hexdigest()


def count_frames() -> int:
    """In how many ways the tellings can be said, each of a story's words counted once.

    Where a telling says when, or introduces the other character, the ways of doing that count too.
    """
    whens = sum(ways(parse(when)) for when in (*grammar.WHENS, *grammar.LATER_WHENS))
    tellings = [beat for plot in grammar.PLOTS.values() for beat in plot.beats]
    tellings += [*grammar.INTROS, *grammar.STAMPED_INTROS, *grammar.LIKE_LINES, *grammar.CLOSERS]
    return sum(
        ways(parse(telling)) * (whens if "{when}" in telling else 1) * (2 if "{fintro}" in telling else 1)
        for telling in tellings
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stories", type=int, default=1000, help="how many documents (default 1000)")
    parser.add_argument("--seed", type=int, default=TRAIN_SEED, help=f"{HELD_OUT_SEED} is held out")
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    parser.add_argument("--frames", action="store_true", help="count the grammar's sentence frames and stop")
    arguments = parser.parse_args()
    if arguments.frames:
        print(count_frames())
        return
    digest = hashlib.sha256()
    out = arguments.out.open("wb") if arguments.out else sys.stdout.buffer
    for text in documents(arguments.seed, 0, arguments.stories):
        line = (text + "\n").encode()
        digest.update(line)
        out.write(line)
    out.flush()
    print(f"sha256 {digest.hexdigest()}", file=sys.stderr if arguments.out is None else sys.stdout)


if __name__ == "__main__":
    main()
