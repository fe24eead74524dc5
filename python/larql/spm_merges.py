"""The merges of a SentencePiece vocabulary, which lists pieces only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def used_merges(ranked: Sequence[str]) -> list[tuple[str, str]]:
    """The merges that encoding a text can use, best first; `ranked` are the pieces, best first.

    Of all neighbours that join to a piece, those whose piece is best go first, the leftmost if there are several. So a
    piece is always made by the same last merge, the one that its own text alone ends with: within its place in a longer
    text, merges come in the same order, and none crosses its ends. The other ways to cut the piece in two are left out.
    """
    rank = {piece: i for i, piece in enumerate(ranked)}
    characters = {piece for piece in ranked if len(piece) == 1}
    merges = []
    for piece in ranked:
        if len(piece) > 1 and characters.issuperset(piece) and (merge := _last_merge(piece, rank)):
            merges.append(merge)
    return merges


def _last_merge(piece: str, rank: Mapping[str, int]) -> tuple[str, str] | None:
    """The two parts that a piece, all of whose characters are pieces, is made of in the end."""
    never = len(rank)
    parts = list(piece)
    joins = [rank.get(left + right, never) for left, right in pairwise(parts)]  # of each part and the next
    while len(joins) > 1:
        best = min(joins)
        if best == never:
            return None
        at = joins.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joins[at]
        if at > 0:
            joins[at - 1] = rank.get(parts[at - 1] + parts[at], never)
        if at < len(joins):
            joins[at] = rank.get(parts[at] + parts[at + 1], never)
    return parts[0], parts[1]
