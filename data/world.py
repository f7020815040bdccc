"""A small synthetic world: an illustrated guide to the stations of a coastal railway."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations

from PIL import Image

from mpic_rag.data import words
from mpic_rag.data.pictures import draw_chart, draw_sign

Part = str | Image.Image
Chunk = tuple[Part, ...]
Place = tuple[int, int]  # page index, chunk index
KINDS = ("text_lookup", "picture_lookup", "picture_to_text", "text_to_picture", "comparison")


@dataclass(frozen=True)
class Page:
    """One document: a station's name and its chunks in order."""

    name: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Question:
    """A question; `evidence` are the chunks that hold the values asked for or named in it.

    `split` is true where a chunk of the evidence does not itself name its station.
    """

    text: str
    answer: str
    kind: str
    evidence: tuple[Place, ...]
    split: bool


@dataclass(frozen=True)
class Shelf:
    """A collection of pages and the questions that can be asked about them."""

    pages: tuple[Page, ...]
    questions: tuple[Question, ...]


@dataclass
class _Station:
    name: str
    facts: dict[str, str]  # what is true of the station
    places: dict[str, Place] = field(default_factory=dict)  # where the guide says so
    sign: bool = True


def _stations(rng: random.Random, count: int) -> list[_Station]:
    names = rng.sample(words.STATIONS, count)
    keepers, goods = rng.sample(words.KEEPERS, count), rng.sample(words.GOODS, count)
    years = rng.sample(range(1840, 1930), count)
    signs = rng.sample([(c, s) for c in words.COLOURS for s in words.SHAPES], count)
    numbers: list[int] = []
    while len(numbers) < count:
        number = rng.randint(10, 99)
        if numbers and rng.random() < 0.3:  # comparisons must not hang on the first digit alone
            number = rng.choice(numbers) // 10 * 10 + rng.randint(0, 9)
        if number not in numbers:
            numbers.append(number)
    stations = []
    for i, name in enumerate(names):
        colour, shape = signs[i]
        facts = {"keeper": keepers[i], "goods": goods[i], "year": str(years[i])}
        facts |= {"number": str(numbers[i]), "colour": colour, "shape": shape}
        facts["tallest"] = rng.choice(list(words.COLOURS))
        stations.append(_Station(name, facts))
    return stations


def _layout(rng: random.Random, picture: bool, texts: int) -> list[str]:
    """Forms of a page's chunks.

    T: text that names the station, R: text that runs on without the name, C: picture with its
    caption, P: picture alone, its caption ends the text before it.
    """
    if not picture:
        return ["T", "R"][:texts]
    if texts == 0:
        return ["C"]
    if texts == 1:
        return rng.choices([["C", "T"], ["T", "P"], ["C", "R"]], [6, 52, 42])[0]
    return rng.choices([["T", "R", "C"], ["T", "R", "P"], ["T", "P", "R"]], [20, 40, 40])[0]


def _text(
    rng: random.Random, station: _Station, facts: list[str], named: bool, people: list[str]
) -> str:
    """Sentences that state the facts, some distractors among them; plain ones without people."""
    facts = rng.sample(facts, len(facts))
    groups = [tuple(sorted(facts[:2])), *((f,) for f in facts[2:])]
    if rng.random() < 0.6:
        groups = [(f,) for f in facts]
    rng.shuffle(groups)
    values = {"s": station.name, **station.facts}
    if not people:
        return " ".join(rng.choice(words.NAMED[g]).format(**values) for g in groups)
    sentences = [rng.choice(words.RUN_ON[g]).format(**values) for g in groups]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        distractor = rng.choice(words.DISTRACTORS)
        distractor = distractor.format(p=rng.choice(people), n=rng.randint(12, 480))
        sentences.insert(rng.randint(0, len(sentences)), distractor)
    if named and rng.random() < 0.4:
        sentences.insert(0, rng.choice(words.INTROS).format(**values))
    elif named:
        first = next(i for i, s in enumerate(sentences) if _states(s, groups[0], station))
        sentences[first] = rng.choice(words.NAMED[groups[0]]).format(**values)
        sentences.insert(0, sentences.pop(first))
    return " ".join(sentences)


def _states(sentence: str, group: tuple[str, ...], station: _Station) -> bool:
    """Whether the sentence states the facts of the group."""
    tokens = sentence.replace(".", " ").replace(",", " ").split()
    return all(station.facts[fact] in tokens for fact in group)


def _picture(rng: random.Random, station: _Station) -> tuple[str, Image.Image]:
    facts = station.facts
    if station.sign:
        image = draw_sign(rng, facts["colour"], facts["shape"], int(facts["number"]))
        return rng.choice(words.SIGN_CAPTIONS).format(s=station.name), image
    others = [c for c in words.COLOURS if c != facts["tallest"]]
    image = draw_chart(rng, [facts["tallest"], *rng.sample(others, rng.randint(2, 4))])
    return rng.choice(words.CHART_CAPTIONS).format(s=station.name), image


def _page(
    rng: random.Random, index: int, station: _Station, picture: bool, texts: int, people: list[str]
) -> Page:
    forms = _layout(rng, picture, texts) if people else ["C"] * picture + ["T"] * texts
    told = rng.sample(["keeper", "goods", "year"], 3 if texts == 2 else rng.choice((2, 3)))
    cut = rng.choice((1, 2)) if texts == 2 else len(told)
    shares = [told[:cut], told[cut:]]
    caption, image = _picture(rng, station) if picture else ("", None)
    chunks: list[Chunk] = []
    for i, form in enumerate(forms):
        if image is not None and form in "CP":
            chunks.append((caption, image) if form == "C" else (image,))
            seen = ["number", "colour", "shape"] if station.sign else ["tallest"]
        else:
            seen = shares.pop(0)
            text = _text(rng, station, seen, form == "T", people)
            if forms[i + 1 : i + 2] == ["P"]:
                text = f"{text} {caption}"
            chunks.append((text,))
        station.places |= dict.fromkeys(seen, (index, i))
    return Page(station.name, tuple(chunks))


def _ask(
    rng: random.Random, pages: list[Page], stations: list[_Station]
) -> list[tuple[str, str, str, list[Place]]]:
    """Every question of the shelf as (text, answer, kind, evidence)."""
    asked: list[tuple[str, str, str, list[Place]]] = []
    for station in stations:
        name, facts, places = station.name, station.facts, station.places
        for fact, place in places.items():
            kind = "text_lookup" if fact in ("keeper", "goods", "year") else "picture_lookup"
            question = rng.choice(words.LOOKUPS[fact])
            asked.append((question.format(s=name), f"{name} {facts[fact]}", kind, [place]))
        told = [f for f in ("keeper", "goods", "year") if f in places]
        seen = [f for f in ("number", "colour", "shape", "tallest") if f in places]
        for fact in told if "shape" in places else []:
            clue = rng.choice(words.BY_SIGN).format(**facts)
            question = rng.choice(words.LOOKUPS[fact]).format(s=clue)
            answer = f"{facts['colour']} {facts['shape']} {name} {facts[fact]}"
            asked.append((question, answer, "picture_to_text", [places["shape"], places[fact]]))
        for clue_fact in [f for f in ("keeper", "goods") if f in told]:
            for fact in [f for f in told + seen if f != clue_fact]:
                kind = "text_to_text" if fact in told else "text_to_picture"
                clue = rng.choice(words.BY_TEXT[clue_fact]).format(**facts)
                question = rng.choice(words.LOOKUPS[fact]).format(s=clue)
                answer = f"{facts[clue_fact]} {name} {facts[fact]}"
                asked.append((question, answer, kind, [places[clue_fact], places[fact]]))
        summary = ", ".join(f"{fact} {facts[fact]}" for fact in told + seen)
        everything = [places[fact] for fact in told + seen]
        question = rng.choice(words.DESCRIBE).format(s=name)
        asked.append((question, f"{name} {summary}", "describe", everything))
    signs = [s for s in stations if "number" in s.places]
    pairs = list(combinations(signs, 2))
    for pair in rng.sample(pairs, min(len(pairs), len(signs))):
        a, b = rng.sample(pair, 2)
        question = rng.choice(words.COMPARISONS).format(a=a.name, b=b.name)
        first, second = a.facts["number"], b.facts["number"]
        larger = a.name if int(first) > int(second) else b.name
        answer = f"{a.name} {first}, {b.name} {second}: {larger}"
        asked.append((question, answer, "comparison", [a.places["number"], b.places["number"]]))
    return asked


def names_station(page: Page, chunk: int) -> bool:
    """Whether a chunk of the page says which station it is about."""
    return any(isinstance(part, str) and page.name in part for part in page.chunks[chunk])


def make_shelf(
    rng: random.Random, stations: int = 8, pictures: int = 8, texts: int = 8, plain: float = 0.0
) -> Shelf:
    """A random shelf with exactly this many pages, picture chunks and text chunks.

    `plain` is the share of pages, for training, whose every sentence names the station.
    """
    if not 0 <= pictures <= stations or not stations - pictures <= texts <= 2 * stations:
        raise ValueError("a page has a picture or a text, at most one picture and two texts")
    found = _stations(rng, stations)
    illustrated = set(rng.sample(range(stations), pictures))
    counts = [0 if i in illustrated else 1 for i in range(stations)]
    free = [i for i in range(stations) for _ in range(2 - counts[i])]
    for i in rng.sample(free, texts - sum(counts)):
        counts[i] += 1
    people = [p for p in words.KEEPERS if p not in {s.facts["keeper"] for s in found}]
    pages = []
    for i, station in enumerate(found):
        station.sign = rng.random() < 0.75
        crowd = [] if rng.random() < plain else people
        pages.append(_page(rng, i, station, i in illustrated, counts[i], crowd))
    questions = []
    for text, answer, kind, evidence in _ask(rng, pages, found):
        places = tuple(dict.fromkeys(evidence))
        split = any(not names_station(pages[p], c) for p, c in places)
        questions.append(Question(text, answer, kind, places, split))
    rng.shuffle(questions)
    return Shelf(tuple(pages), tuple(questions))
