"""FrozenLake as text: walk over the ice to the goal, around the holes.

Invariant: the goal of every map can be reached, and an episode has at most `max_moves`
turns.
"""

from __future__ import annotations

import random
import re
from collections import deque

from verl_ray.agents.contract import Action, EpisodeTask, Observation, Step
from verl_ray.agents.environments.conversation import opening, user
from verl_ray.errors import InputError

Cell = tuple[int, int]
"""Row and column, counted from the upper left corner."""

MOVES: dict[str, Cell] = {
    "up": (-1, 0),
    "right": (0, 1),
    "down": (1, 0),
    "left": (0, -1),
}
"""Moves in the order of the clock; the neighbours of a move are those aside of it."""

_WORD = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)

_RULES = """\
You stand on a frozen lake. S is the start, F is ice, H is a hole, G is the goal, and \
P is your place. Walk to G and around every H. In each turn you make one move, which \
is the last of the words up, right, down and left that you write. You have {moves} \
moves.

{picture}"""


def solvable_map(size: int, num_holes: int, rng: random.Random) -> frozenset[Cell]:
    """Return the holes of a map on which the goal can be reached.

    Holes are tried in a random order; one that would close the last way is left out.
    """
    cells = [(row, column) for row in range(size) for column in range(size)]
    candidates = cells[1:-1]
    rng.shuffle(candidates)

    holes: frozenset[Cell] = frozenset()
    for cell in candidates:
        if len(holes) == num_holes:
            break
        if (0, 0) in distances(size, holes | {cell}):
            holes |= {cell}
    return holes


def distances(size: int, holes: frozenset[Cell]) -> dict[Cell, int]:
    """Return the moves to the goal from every cell from which it can be reached."""
    goal = (size - 1, size - 1)
    lengths = {goal: 0}
    ahead = deque([goal])

    while ahead:
        cell = ahead.popleft()
        for name in MOVES:
            neighbour = _moved(cell, name, size)
            if neighbour not in holes and neighbour not in lengths:
                lengths[neighbour] = lengths[cell] + 1
                ahead.append(neighbour)
    return lengths


def _moved(cell: Cell, name: str, size: int) -> Cell:
    """Return the cell after a move; the border stops it."""
    down, right = MOVES[name]
    row = min(max(cell[0] + down, 0), size - 1)
    column = min(max(cell[1] + right, 0), size - 1)
    return row, column


class FrozenLake:
    """A walk over a frozen lake; the seed makes the map.

    The goal is worth 1, and a hole ends the episode without it. A turn without a word
    of a move uses up a move, and the walker stays.
    """

    def __init__(
        self,
        size: int = 4,
        num_holes: int = 4,
        max_moves: int | None = None,
        shaping: float = 0.0,
        slippery: bool = False,
    ) -> None:
        """Take the rules.

        Args:
            size: Cells of a side of the map.
            num_holes: Number of holes; less where more would close the last way.
            max_moves: Number of moves; four times the size without it.
            shaping: Reward for walking the whole way, which is paid in parts: a move
                from distance d to distance e of D at the start earns
                shaping * (d - e) / D, which may be negative. A fall earns nothing.
            slippery: Whether the ice is slippery: a move goes to its own direction or
                to either side of it, each in a third of the cases.

        Raises:
            InputError: The numbers make no map.
        """
        moves = 4 * size if max_moves is None else max_moves
        place = "FrozenLake"
        if not 2 <= size <= 16:
            raise InputError(f"size={size}", "2 to 16", place=place)
        if num_holes < 0:
            raise InputError(f"num_holes={num_holes}", "at least 0", place=place)
        if moves < 1:
            raise InputError(f"max_moves={moves}", "at least 1", place=place)

        self._size = size
        self._num_holes = num_holes
        self._max_moves = moves
        self._shaping = shaping
        self._slippery = slippery
        self._rng = random.Random(0)
        self._holes: frozenset[Cell] = frozenset()
        self._distances: dict[Cell, int] = {}
        self._cell: Cell = (0, 0)
        self._remaining = moves

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Make a map, which depends on the seed alone."""
        self._rng = random.Random(seed)
        self._holes = solvable_map(self._size, self._num_holes, self._rng)
        self._distances = distances(self._size, self._holes)
        self._cell = (0, 0)
        self._remaining = self._max_moves

        rules = _RULES.format(moves=self._max_moves, picture=self._picture())
        return Observation(opening(task.messages, rules))

    async def step(self, action: Action) -> Step:
        """Move, and say where the walker is."""
        words = _WORD.findall(action.text)
        self._remaining -= 1
        if not words:
            return self._reply(0.0, "You named no move.")

        before = self._cell
        self._cell = _moved(before, self._direction(words[-1].lower()), self._size)
        if self._cell in self._holes:
            return Step(done=True)

        reward = self._shaping_of(before, self._cell)
        if self._distances[self._cell] == 0:
            return Step(reward=reward + 1.0, done=True)
        reply = "You stay where you are." if self._cell == before else "You moved."
        return self._reply(reward, reply)

    def _direction(self, name: str) -> str:
        if not self._slippery:
            return name
        names = list(MOVES)
        turn = self._rng.choice((-1, 0, 1))
        return names[(names.index(name) + turn) % len(names)]

    def _shaping_of(self, before: Cell, after: Cell) -> float:
        gain = self._distances[before] - self._distances[after]
        return self._shaping * gain / self._distances[0, 0]

    def _reply(self, reward: float, text: str) -> Step:
        if self._remaining == 0:
            return Step(reward=reward, done=True)
        text = f"{text} Moves that remain: {self._remaining}.\n\n{self._picture()}"
        return Step([user(text)], reward=reward)

    def _picture(self) -> str:
        rows = range(self._size)
        return "\n".join(
            "".join(self._letter((row, column)) for column in rows) for row in rows
        )

    def _letter(self, cell: Cell) -> str:
        if cell == self._cell:
            return "P"
        if cell in self._holes:
            return "H"
        if cell == (0, 0):
            return "S"
        return "G" if cell == (self._size - 1, self._size - 1) else "F"

    async def close(self) -> None:
        """Do nothing: the environment holds nothing."""
