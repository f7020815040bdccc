"""The pictures of the world: station signs and bar charts, each a little different."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw, ImageFont

from mpic_rag.data.words import COLOURS, SHAPES

SIZE = 168
_SCALE = 2  # drawn twice as large, then averaged: smooth edges at little cost
_FONTS: dict[int, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if size not in _FONTS:
        _FONTS[size] = ImageFont.load_default(size)
    return _FONTS[size]


def _canvas(rng: random.Random) -> Image.Image:
    tint = tuple(rng.randint(222, 255) for _ in range(3))
    return Image.new("RGB", (SIZE * _SCALE, SIZE * _SCALE), tint)


def _shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, c + rng.randint(-14, 14))) for c in COLOURS[colour])
    return red, green, blue


def _corners(shape: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    """The outline of a shape with its centre at (x, y) and radius r."""
    if shape == "cross":
        a = r * 0.36
        plan = [(-a, -r), (a, -r), (a, -a), (r, -a), (r, a), (a, a)]
        plan += [(-px, -py) for px, py in plan]
        return [(x + px, y + py) for px, py in plan]
    count = {"square": 4, "triangle": 3, "star": 10, "diamond": 4, "hexagon": 6}[shape]
    turn = {"square": math.pi / 4, "hexagon": 0.0}.get(shape, -math.pi / 2)
    points = []
    for i in range(count):
        angle = turn + 2 * math.pi * i / count
        radius = r * 0.45 if shape == "star" and i % 2 else r
        squeeze = 0.7 if shape == "diamond" else 1.0
        points.append((x + squeeze * radius * math.cos(angle), y + radius * math.sin(angle)))
    return points


def draw_sign(rng: random.Random, colour: str, shape: str, number: int) -> Image.Image:
    """A coloured shape above a two-digit number."""
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}")
    image = _canvas(rng)
    draw = ImageDraw.Draw(image)
    x = _SCALE * (SIZE / 2 + rng.uniform(-10, 10))
    y = _SCALE * (54 + rng.uniform(-5, 5))
    r = _SCALE * 42 * rng.uniform(0.9, 1.1)
    fill = _shade(rng, colour)
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    else:
        draw.polygon(_corners(shape, x, y, r), fill=fill)
    ink = (rng.randint(15, 60),) * 3
    x = _SCALE * (SIZE / 2 + rng.uniform(-8, 8))
    y = _SCALE * (132 + rng.uniform(-4, 4))
    draw.text((x, y), str(number), fill=ink, font=_font(_SCALE * rng.randint(58, 64)), anchor="mm")
    return image.reduce(_SCALE)


def draw_chart(rng: random.Random, colours: list[str]) -> Image.Image:
    """Bars in the given colours; the first one is clearly the tallest."""
    image = _canvas(rng)
    draw = ImageDraw.Draw(image)
    base = _SCALE * (152 + rng.uniform(-4, 4))
    top = _SCALE * rng.uniform(110, 132)
    heights = {c: top * rng.uniform(0.2, 0.75) for c in colours[1:]}
    heights[colours[0]] = top
    order = rng.sample(colours, len(colours))
    left = _SCALE * (14 + rng.uniform(-4, 4))
    pitch = _SCALE * 142 / len(order)
    for i, colour in enumerate(order):
        x = left + pitch * i
        box = (x, base - heights[colour], x + pitch * 0.72, base)
        draw.rectangle(box, fill=_shade(rng, colour))
    ink = (70, 70, 74)
    draw.line((left - 6, base, left + _SCALE * 142, base), fill=ink, width=2 * _SCALE)
    return image.reduce(_SCALE)
