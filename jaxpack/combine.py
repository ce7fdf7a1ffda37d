"""Which packs are fused into one program: host arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

MOST_FUSED = 4
"""Members of a fused program by default: each adds its own time to compile."""


def partition(steps: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """Puts packs that train for about equally long into one program.

    Members step together, so a program is fullest where all have work to the end.

    Args:
      steps: The steps that each pack's trials may be expected to train in all.
      most: Members of a program at most.

    Returns:
      The packs of each program, by number; the longest first.

    Examples:
      >>> partition([10, 500, 20, 400, 300], most=4)
      [(1, 3, 4), (2, 0)]
    """
    longest_first = sorted(range(len(steps)), key=lambda i: -steps[i])
    programs = -(-len(steps) // most)
    share = -(-len(steps) // max(programs, 1))
    return [
        tuple(longest_first[i : i + share])
        for i in range(0, len(longest_first), max(share, 1))
    ]


def filled(
    members: tuple[int, ...], trials: Sequence[int], most: int, workers: int
) -> tuple[int, ...]:
    """Adds copies of packs with many trials to a program with room for them.

    No pack gets more copies than it has trials, once every worker has the program.

    Args:
      members: The packs of a program, by number.
      trials: The trials of each pack.
      most: Members of a program at most.
      workers: Worker threads.

    Examples:
      >>> filled((0, 1), trials=[10, 2], most=4, workers=1)
      (0, 0, 0, 1)
      >>> filled((0,), trials=[3], most=4, workers=2)
      (0, 0)
    """
    copies = dict.fromkeys(members, 1)
    while sum(copies.values()) < most:
        share = {i: trials[i] / n for i, n in copies.items() if trials[i] > n * workers}
        if not share:
            break
        copies[max(share, key=lambda i: share[i])] += 1
    return tuple(i for i, n in copies.items() for _ in range(n))
