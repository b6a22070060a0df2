"""Observations of gymnax in words.

Owns: one function per game, from the arrays of many slots to one text each. Pure NumPy: nothing here knows jax.
Promises: every word follows from the observation array alone; what gymnax does not show (the walls of the four rooms, the goal of the maze,
the meaning of a button) is not told.
Does not: tell rules or actions.

``words(observations)``: the first axis runs over slots. One space stands before every word, so that a tokenizer whose pieces carry the
space loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Words = Callable[[np.ndarray], list[str]]

NUMBERS = ("first", "second", "third")


def four_rooms(observations: Int[np.ndarray, "n 4"]) -> list[str]:
    """Row and column of you and of the goal; walls are not in the observation."""
    return [
        f" you row {row} column {column} goal row {to_row} column {to_column}" for row, column, to_row, to_column in observations.tolist()
    ]


def meta_maze(observations: Float[np.ndarray, "n 15"]) -> list[str]:
    """The squares around you that are open, until you step on the goal; neither your place nor the goal can be seen. In the observation
    of that step gymnax has moved you on to another square: what is open there is not told."""
    open_sides = observations[:, [1, 5, 7, 3]] == 0  # of the 3 by 3 squares, row by row, those to the four sides
    names = ("up", "right", "down", "left")
    found = observations[:, 13] > 0
    return [
        " goal" if here else " open" + "".join(f" {name}" for name, is_open in zip(names, sides, strict=True) if is_open)
        for sides, here in zip(open_sides.tolist(), found.tolist(), strict=True)
    ]


def deep_sea(observations: Float[np.ndarray, "n size size"]) -> list[str]:
    """Depth and column of the diver."""
    size = observations.shape[1]
    flat = observations.reshape(len(observations), size * size)
    at, diving = flat.argmax(axis=1).tolist(), (flat.max(axis=1) > 0).tolist()
    return [f" depth {cell // size} column {cell % size}" if on else " bottom" for cell, on in zip(at, diving, strict=True)]


def memory_chain(observations: Float[np.ndarray, "n 5"], length: int = 5) -> list[str]:
    """The bits while they are shown, the number of the bit that is asked for in the last turn, and the turns to wait."""
    left = np.rint(observations[:, 0] * length).astype(int).tolist()
    asked = np.rint(observations[:, 1]).astype(int).tolist()
    bits = np.rint(observations[:, 2:]).astype(int).tolist()
    texts = []
    for wait, number, shown in zip(left, asked, bits, strict=True):
        text = f" wait {max(wait - 1, 0)}"
        if any(shown):
            text += " bits" + "".join(" one" if bit > 0 else " zero" for bit in shown)
        if wait == 1:
            text += f" say bit {NUMBERS[number]}"
        texts.append(text)
    return texts


def catch(observations: Float[np.ndarray, "n rows columns"]) -> list[str]:
    """Column and height of the ball and column of the paddle, which is in the bottom row."""
    bottom = observations.shape[1] - 1
    paddle = observations[:, bottom].argmax(axis=1).tolist()
    columns = observations.shape[2]
    above = observations[:, :bottom].reshape(len(observations), bottom * columns)
    ball, falling = above.argmax(axis=1).tolist(), (above.max(axis=1) > 0).tolist()
    return [
        f" ball column {at % columns} height {bottom - at // columns} paddle column {below}" if on else " ball down"
        for at, on, below in zip(ball, falling, paddle, strict=True)
    ]


def umbrella_chain(observations: Float[np.ndarray, "n 7"], length: int = 10) -> list[str]:
    """The forecast, whether there is an umbrella, the way that is left, and who passes by (which means nothing)."""
    need, has = (observations[:, i] > 0.5 for i in (0, 1))
    left = np.rint(observations[:, 2] * length).astype(int).tolist()
    passing = ("cat", "dog", "bird", "cart")
    texts = []
    for rain, umbrella, way, seen in zip(need.tolist(), has.tolist(), left, (observations[:, 3:] > 0.5).tolist(), strict=True):
        text = f" forecast {'rain' if rain else 'sun'} umbrella {'yes' if umbrella else 'no'} way {way}"
        texts.append(text + "".join(f" {what}" for what, there in zip(passing, seen, strict=True) if there))
    return texts


def breakout(observations: Float[np.ndarray, "n 10 10 4"]) -> list[str]:
    """Column and height of the ball, where it came from, the column of the paddle, and the bricks left in each row."""
    paddle = observations[:, 9, :, 0].argmax(axis=1).tolist()
    flat = observations.reshape(len(observations), 100, 4)
    ball, trail = flat[:, :, 1].argmax(axis=1), flat[:, :, 2].argmax(axis=1)
    rows = observations[:, 1:4, :, 3].sum(axis=2).astype(int).tolist()
    texts = []
    for now, before, below, bricks in zip(ball.tolist(), trail.tolist(), paddle, rows, strict=True):
        text = f" ball column {now % 10} height {9 - now // 10} from column {before % 10} height {9 - before // 10} paddle column {below}"
        texts.append(text + " bricks" + "".join(f" {count}" for count in bricks))
    return texts
