"""`generate`: a program from a seed."""

import random
from dataclasses import replace

import torch

from tests.fuzz import activations, functions, images, rows
from tests.fuzz.draft import Draft, Move
from tests.fuzz.program import Program, namespace
from tests.fuzz.surroundings import surrounded, written_by_hand

OF_ANY = (
    (activations.activation, 3), (activations.activation_in_place, 4), (activations.in_place_while_read, 2),
    (activations.join, 3), (activations.join_and_clip, 3), (activations.view, 2), (activations.parts, 1),
    (activations.slices, 1), (functions.function, 3),
)  # fmt: skip


LAYERS = ("nn.Conv", "OwnConv2d", "nn.Linear", "nn.Sequential", "nn.MultiheadAttention")


def generate(seed: int, attempt: int = 0) -> Program:
    """The program of this seed, always the same; if torch refuses it, the next attempt gives another."""
    rng = random.Random(f"{seed} {attempt}")
    while True:
        program = _drawn(seed, rng)
        if any(made.startswith(LAYERS) for made in program.used().values()):
            return written_by_hand(program, rng)


def _drawn(seed: int, rng: random.Random) -> Program:
    program = Program(seed, _input(rng))
    torch.manual_seed(seed)
    other = program.x if rng.random() < 0.1 and "randint" not in program.x else ""
    program = replace(program, other=other)
    draft = Draft(rng, eval(program.x, namespace()), eval(other, namespace()) if other else None)
    first = draft.pick((True, True, True, False))
    if draft.values["v0"].dtype == torch.long:
        draft.attempt(rows.embed, "v0")
    if other:
        draft.attempt(_with_other, "v0")
    wanted = rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8))
    made = tried = 0
    while made < wanted and tried < 40:
        tried += 1
        x = _variable(draft)
        made += draft.attempt(_move(draft, x, first and made == 0), x)
    result = draft.last
    if rng.random() < 0.15:
        result = f"{result}, {rng.choice(list(draft.values))}"
    drawn = replace(program, modules=draft.modules, lines=tuple(draft.lines), result=result)
    return surrounded(drawn, rng)


def _with_other(draft: Draft, x: str) -> None:
    draft.write(("{x} + other", "other - {x}", "torch.cat([{x}, other], 1)", "{x} - 2 * other"), x=x)


def _input(rng: random.Random) -> str:
    batch = rng.choice((1, 2, 2, 3, 4, 5))
    kind = rng.choices(("image", "rows", "sequence", "tokens"), (6, 1, 2, 1))[0]
    if kind == "tokens":
        return f"torch.randint(0, 11, ({batch}, {rng.choice((1, 3, 5, 8))}))"
    if kind == "rows":
        return f"torch.randn({batch + 2}, {rng.choice((1, 3, 8, 12))})"
    if kind == "sequence":
        return f"torch.randn({batch}, {rng.choice((1, 3, 4, 7))}, {rng.choice((1, 4, 6, 8))})"
    size = rng.choice(((8, 8), (8, 8), (7, 7), (5, 6), (4, 4), (9, 3), (1, 1), (1, 1), (1, 8), (16, 16), (13, 12)))
    channels = rng.choice((1, 2, 3, 3, 4, 8, 16))
    made = f"torch.randn({batch}, {channels}, {size[0]}, {size[1]})"
    return made + rng.choice(("", "", "", ".to(memory_format=torch.channels_last)", ".transpose(2, 3)", "[:, :, ::2]"))


def _variable(draft: Draft) -> str:
    names = [name for name, value in draft.values.items() if value.is_floating_point()]
    return names[-1] if draft.chance(0.8) else str(draft.pick(names))


def _move(draft: Draft, x: str, layer_first: bool) -> Move:
    """A random move that fits the variable's number of axes."""
    moves = {4: images.MOVES, 3: rows.SEQUENCE_MOVES, 2: rows.ROW_MOVES}.get(draft.values[x].dim(), ())
    if not moves or (not layer_first and draft.chance(0.45)):
        moves = OF_ANY
    move: Move = draft.rng.choices([move for move, _ in moves], [weight for _, weight in moves])[0]
    return move
