"""The words of the world: names, values and sentence templates."""

from __future__ import annotations

import re


def _split(text: str) -> list[str]:
    return text.split()


STATIONS = _split("""
    amberbay cliffton dunmere eastholm fernport gullhaven harrowby inverloch juniperton kelpsand
    larkmouth mossgate northwick oysterley pebblecove quillmarsh ravenpier saltcombe tidewell
    umberley vinestrand whitsea yarrowby zennorth brinefield coralton driftham elderquay foxcliff
    greyshore heronby ironquay
""")
KEEPERS = _split("""
    maria peter anna thomas clara henrik ingrid oscar lucia martin helena victor rosa simon agnes
    david edith felix greta hugo irene jonas karin leon
""")
GOODS = _split("""
    salt herring timber slate wool barley apples copper rope glass honey cheese coal tin peat
    linen oats bricks candles mussels leather paper cider soap
""")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (205, 35, 40),
    "blue": (35, 75, 200),
    "green": (30, 140, 60),
    "yellow": (240, 205, 30),
    "purple": (130, 45, 160),
    "orange": (240, 125, 20),
    "black": (30, 30, 34),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "hexagon", "cross")

# Sentences about one or two facts: the first list names the station, the second one runs on.
NAMED: dict[tuple[str, ...], list[str]] = {
    ("keeper",): [
        "{s} is kept by {keeper}.",
        "the keeper of {s} is {keeper}.",
        "{s} has a keeper called {keeper}.",
        "at {s} the keeper is called {keeper}.",
    ],
    ("goods",): [
        "{s} ships {goods}.",
        "at {s} they load {goods}.",
        "the trains from {s} carry {goods}.",
        "{s} is known for its {goods}.",
    ],
    ("year",): [
        "{s} opened in {year}.",
        "the line reached {s} in {year}.",
        "the station of {s} dates from {year}.",
    ],
    ("goods", "keeper"): [
        "{s}, kept by {keeper}, ships {goods}.",
        "{s} ships {goods} and is kept by {keeper}.",
    ],
    ("goods", "year"): [
        "{s} opened in {year} and ships {goods}.",
        "{s} has been shipping {goods} since {year}.",
    ],
    ("keeper", "year"): [
        "{s} dates from {year} and its keeper is {keeper}.",
        "{s}, kept by {keeper}, opened in {year}.",
    ],
}
RUN_ON: dict[tuple[str, ...], list[str]] = {
    ("keeper",): [
        "its keeper is {keeper}.",
        "it is kept by {keeper}.",
        "{keeper} keeps the station.",
        "the keeper here is called {keeper}.",
    ],
    ("goods",): [
        "it ships {goods}.",
        "they load {goods} here.",
        "the trains from here carry {goods}.",
        "the place is known for its {goods}.",
    ],
    ("year",): [
        "it opened in {year}.",
        "the line came here in {year}.",
        "the station dates from {year}.",
    ],
    ("goods", "keeper"): [
        "its keeper is {keeper} and it ships {goods}.",
        "{keeper} keeps it and they load {goods} here.",
    ],
    ("goods", "year"): [
        "it opened in {year} and ships {goods}.",
        "since {year} it has been shipping {goods}.",
    ],
    ("keeper", "year"): [
        "it dates from {year} and its keeper is {keeper}.",
        "it opened in {year} and {keeper} keeps it.",
    ],
}
INTROS = [
    "{s} lies by the sea.",
    "{s} is a small halt on the coast.",
    "few travellers stop at {s}.",
    "this page is about {s}.",
]
DISTRACTORS = [
    "the weather is mild in spring.",
    "fog is common in autumn.",
    "the next town is {n} miles away.",
    "the platform is {n} metres long.",
    "the roof is made of old tiles.",
    "a painter called {p} once lived nearby.",
    "the engineer {p} drew the bridge.",
    "gulls nest above the waiting room.",
    "there are {n} steps down to the beach.",
    "the bench was a gift from {p}.",
]
SIGN_CAPTIONS = [
    "the sign of {s}:",
    "here is the sign of {s}:",
    "this is the station sign of {s}:",
    "the sign at {s} looks like this:",
]
CHART_CAPTIONS = [
    "the chart of {s}:",
    "here is the chart of {s}:",
    "this chart shows the visitors of {s}:",
    "the chart for {s} looks like this:",
]

LOOKUPS: dict[str, list[str]] = {
    "keeper": ["who keeps {s}?", "who is the keeper of {s}?", "what is the keeper of {s} called?"],
    "goods": ["what does {s} ship?", "which goods are loaded at {s}?", "what goods come from {s}?"],
    "year": ["when did {s} open?", "in which year did {s} open?", "from what year is {s}?"],
    "number": ["what number is on the sign of {s}?", "which number does the sign of {s} show?"],
    "colour": ["what colour is the sign of {s}?", "which colour does the sign of {s} have?"],
    "shape": ["what shape is on the sign of {s}?", "which shape does the sign of {s} show?"],
    "tallest": [
        "which bar is tallest in the chart of {s}?",
        "what colour is the tallest bar in the chart of {s}?",
    ],
}
BY_SIGN = ["the station with the {colour} {shape}", "the place whose sign is a {colour} {shape}"]
BY_TEXT: dict[str, list[str]] = {
    "keeper": ["the station that {keeper} keeps", "the place kept by {keeper}"],
    "goods": ["the station that ships {goods}", "the place known for {goods}"],
}
COMPARISONS = [
    "which has the larger number, {a} or {b}?",
    "whose sign shows the larger number, {a} or {b}?",
]
DESCRIBE = ["describe {s}.", "what does the guide say about {s}?"]
SYSTEM = "Answer from the guide."


def vocabulary() -> list[str]:
    """Every word that the world's texts, questions and answers are made of, sorted."""
    texts = [*INTROS, *DISTRACTORS, *SIGN_CAPTIONS, *CHART_CAPTIONS, *BY_SIGN, *COMPARISONS]
    for table in (NAMED, RUN_ON, LOOKUPS, BY_TEXT):
        for sentences in table.values():
            texts += sentences
    texts += [*DESCRIBE, *STATIONS, *KEEPERS, *GOODS, *COLOURS, *SHAPES, *LOOKUPS, SYSTEM]
    texts += ["system user assistant sign chart"]
    plain = re.sub(r"\{\w+\}", " ", " ".join(texts))
    return sorted(set(re.findall(r"[A-Za-z]+", plain)))
