"""What the expert tries, level by level.

Owns: ``choose``: a policy for a task, which sees what lies behind the text of a copy of the game and knows the level.
Promises: deterministic given its draws.
Does not: promise to win; see ``expert``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Set

from envs.minihack import oracle, paths
from envs.minihack.env import MiniHackText
from envs.minihack.oracle import Level, Square

Policy = Callable[[MiniHackText], str]  # the next action, from what lies behind the text; "" gives the try up


def choose(name: str, known: Level, draw: random.Random, number: int) -> Policy:
    """The policy of try ``number`` (from 0: the plainest) at task ``name``."""
    fight, floor = number % 2 == 1, sorted(known.floor)
    detour = floor[int(draw.random() * len(floor))] if name.startswith("hidenseek") and number else None
    hunter = _Hunter(known, fight, detour)
    if name.startswith("keyroom"):
        return hunter.fetch_key_and_enter
    if name.startswith("river"):
        return _Pusher(known, fight, swim=draw.random() < 0.7).act
    if name.startswith("memento"):
        return hunter.kill_grid_bug
    if name.startswith("lavacross"):
        return hunter.cross_lava
    if name.startswith("corridor") and number:
        return _Holder(known, hunter, turns=10 + int(draw.random() * 30), back=int(draw.random() * 4)).act
    return hunter.to_stairs


class _Hunter:
    """Walks by shortest ways over a level it knows, round traps and peaceful monsters; fights what stands in the way (or, ``fight``, all
    that is next to it)."""

    def __init__(self, known: Level, fight: bool, detour: Square | None = None) -> None:
        self._known, self._fight, self._detour = known, fight, detour
        self._refused: set[tuple[Square, str]] = set()
        self._last: tuple[Square, str, int] | None = None
        self._used = False  # the thing that crosses lava
        self._seen: set[Square] = set()

    def to_stairs(self, copy: MiniHackText) -> str:
        """The next move to the stairs, first to the detour."""
        if self._detour is not None:
            on_the_way = self._way(copy, self._detour)
            if on_the_way:
                return self.go(copy, self._detour)
            self._detour = None
        return self.go(copy, self._known.stairs)

    def kill_grid_bug(self, copy: MiniHackText) -> str:
        """The next move to the end of the arm without a board: the bug sleeps on the way."""
        east = max(x for x, _ in self._known.traps) if self._known.traps else 0
        rows = {y for _, y in self._known.traps}
        ends = sorted((square for square in self._known.floor if square[0] >= east), key=lambda square: (-square[0], square[1]))
        goal = next((square for square in ends if square[1] not in rows), None)
        return self.go(copy, goal)

    def fetch_key_and_enter(self, copy: MiniHackText) -> str:
        """The next action to the key, with it to the door, and in."""
        screen = copy.screen
        here = (screen.x, screen.y)
        if not any("key" in line for line in screen.inventory):
            return self._toward_key(copy, here)
        closed = oracle.read(screen).closed
        for door in sorted(self._known.closed):
            beside = abs(door[0] - here[0]) + abs(door[1] - here[1]) == 1
            if door in closed and beside:
                return "apply"
            if door in closed or not closed:
                if beside or here == door or self._inside(here):
                    break
                sides = [side for move in ("north", "east", "south", "west") if (side := paths.after(door, move)) in self._known.floor]
                ways = [found for side in sides if (found := self._way(copy, side)) is not None]
                return min(ways, key=len)[0] if ways else ""
        return self.go(copy, self._known.stairs)

    def _toward_key(self, copy: MiniHackText, here: Square) -> str:
        seen = oracle.read(copy.screen)
        self._known.things.update(seen.things)  # what one try finds the next ones know
        if "You see here a key" in copy.screen.message:
            return "pickup"
        key = next((square for square, symbol in sorted(self._known.things.items()) if symbol == "("), None)
        if key is not None:
            return "pickup" if here == key else self.go(copy, key)
        self._seen |= seen.floor
        unseen = self._known.floor - self._seen
        found = paths.nearest(here, self._known.floor - self._known.closed, lambda at: at in unseen, self._known.doors)
        return found[0] if found else ""

    def _inside(self, here: Square) -> bool:
        stairs = self._known.stairs
        free = self._known.floor - self._known.closed
        return stairs is not None and paths.way(here, stairs, free, self._known.doors) is not None

    def cross_lava(self, copy: MiniHackText) -> str:
        """The next action to the thing, with it over the lava."""
        screen = copy.screen
        here = (screen.x, screen.y)
        if screen.asking:
            return self._answer(screen.message, screen.inventory)
        east = min(x for x, _ in self._known.lava)
        if self._used or here[0] >= east:
            return self.go(copy, self._known.stairs, over_lava=True)
        carried = _thing_carried(screen.inventory)
        if carried is None:
            thing = next(iter(sorted(self._known.things)), here)  # what is not seen anywhere lies under the hero
            return "pickup" if here == thing else self.go(copy, thing)
        _, verb = carried
        if verb in ("zap", "apply") and here[0] != east - 1:
            return self.go(copy, (east - 1, here[1]))
        return verb

    def _answer(self, question: str, inventory: tuple[str, ...]) -> str:
        carried = _thing_carried(inventory)
        if "direction" in question:
            self._used = True
            return "east"
        if "Right or Left" in question:
            return "r"
        if "Improvise" in question:
            return "y"  # then it asks for the direction
        self._used = carried is not None and carried[1] not in ("zap", "apply")
        return carried[0] if carried else "cancel"

    def go(self, copy: MiniHackText, goal: Square | None, *, over_lava: bool = False) -> str:
        """The next move to ``goal``, or a blow at what is near; "" without a goal, or on it."""
        if goal is None:
            return ""
        found = self._way(copy, goal, over_lava=over_lava)
        screen = copy.screen
        here = (screen.x, screen.y)
        if found is None:
            return paths.toward(here, goal)
        if not found:
            return ""
        if self._fight:
            seen = oracle.read(screen)
            near = [
                square for square in sorted(seen.monsters - seen.peaceful) if max(abs(square[0] - here[0]), abs(square[1] - here[1])) == 1
            ]
            if near and found and paths.after(here, found[0]) != goal:
                return paths.toward(here, near[0])
        self._last = (here, found[0], screen.time)
        return found[0]

    def _way(self, copy: MiniHackText, goal: Square, *, over_lava: bool = False) -> tuple[str, ...] | None:
        screen = copy.screen
        here, seen = (screen.x, screen.y), oracle.read(screen)
        if self._last is not None and self._last[0] == here and self._last[2] == screen.time:
            self._refused.add((here, self._last[1]))
        floor = (self._known.floor | seen.floor) - seen.boulders - self._known.boulders
        if over_lava:
            floor = floor | (self._known.lava if _floats(screen.inventory) else frozenset())
        doors = self._known.doors
        traps = (self._known.traps | seen.traps) - {goal}
        # a peaceful monster stays in the way; a hostile one is fought
        for avoided in (traps | seen.peaceful, traps, frozenset()):
            found = paths.way(here, goal, floor - avoided, doors)
            if found is not None and (not found or (here, found[0]) not in self._refused):
                return found
        return found


class _Holder:
    """Waits in the corridor for some turns, where enemies come one at a time, and fights what comes; then goes on."""

    def __init__(self, known: Level, hunter: _Hunter, turns: int, back: int) -> None:
        y = known.stairs[1] if known.stairs else 0
        narrow = sorted(x for x, row in known.floor if row == y and not {(x, y - 1), (x, y + 1)} & known.floor)
        self._post, self._hunter, self._turns = (narrow[len(narrow) - 1 - back], y), hunter, turns

    def act(self, copy: MiniHackText) -> str:
        """The next move."""
        screen = copy.screen
        here, seen = (screen.x, screen.y), oracle.read(screen)
        near = [square for square in sorted(seen.monsters) if max(abs(square[0] - here[0]), abs(square[1] - here[1])) == 1]
        if here[0] > self._post[0] + 2 or self._turns <= 0:
            return self._hunter.to_stairs(copy)
        if near:
            return paths.toward(here, near[0])
        if here[0] < self._post[0] - 1:
            return self._hunter.go(copy, self._post)
        self._turns -= 1  # a step forth and one back: a move against the wall takes no time
        return "east" if here[0] < self._post[0] else "west"


def _thing_carried(inventory: tuple[str, ...]) -> tuple[str, str] | None:
    """The letter of the thing that crosses lava, and the verb that uses it."""
    verbs = {"potion": "quaff", "ring": "put on", "boots": "wear", "shoes": "wear", "wand": "zap", "horn": "apply"}
    for line in inventory:
        letter, _, name = line.partition(": ")
        for noun, verb in verbs.items():
            if noun in name.split():
                return letter, verb
    return None


def _floats(inventory: tuple[str, ...]) -> bool:
    """Whether what is carried is not what freezes lava (a potion is gone when it works)."""
    carried = _thing_carried(inventory)
    return carried is None or carried[1] not in ("zap", "apply")


class _Pusher:
    """Pushes boulders into the river one after another, then walks over them; with ``swim`` through the last column of water, from which
    the game lets a hero crawl to a square of land beside it."""

    def __init__(self, known: Level, fight: bool, swim: bool) -> None:
        self._known, self._fight, self._swim = known, fight, swim
        self._queue: list[str] = []
        self._expected: Square | None = None

    def act(self, copy: MiniHackText) -> str:
        """The next move."""
        screen = copy.screen
        here, seen = (screen.x, screen.y), oracle.read(screen)
        if self._queue and self._expected == here:
            return self._next(here)
        self._queue = []
        stairs = self._known.stairs
        if stairs is None:
            return ""
        water = {square for square in self._known.water if square not in seen.floor}
        boulders = seen.boulders | {b for b in self._known.boulders if b not in seen.floor and b != here}
        first = min(x for x, _ in self._known.water | self._known.lava)
        boulders = {square for square in boulders if square[0] < first or square in self._known.water}  # others lie on water
        floor = (
            self._known.floor | seen.floor | {square for square in self._known.boulders if square[0] < first} | (self._known.water - water)
        )
        free = floor - boulders
        last = max(x for x, _ in self._known.water | self._known.lava)
        swim = {square for square in water if square[0] == last} if self._swim else set()
        found = paths.way(here, stairs, free) or paths.way(here, stairs, free | swim)
        if not found:
            front = self._front(water, floor)
            found = paths.push(here, floor, boulders, front)
        if not found:
            return ""
        self._queue = list(found)
        return self._next(here)

    def _next(self, here: Square) -> str:
        move = self._queue.pop(0)
        self._expected = paths.after(here, move)
        return move

    def _front(self, water: set[Square], floor: Set[Square]) -> set[Square]:
        """The water squares that make the crossing longer: those of the first column that is not yet crossed anywhere."""
        columns = sorted({x for x, _ in self._known.water | self._known.lava})
        for column in columns:
            filled = {y for x, y in self._known.water - frozenset(water) if x == column}
            if not filled:
                near = {y for x, y in floor if x == column - 1}
                rows = near if column == columns[0] else {y + dy for y in near for dy in (-1, 0, 1)}
                return {square for square in water if square[0] == column and square[1] in rows}
        return set(water)
