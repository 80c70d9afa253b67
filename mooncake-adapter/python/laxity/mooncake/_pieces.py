"""The pieces of memory that one call of the Transfer Engine moves, cut to the bytes that are permitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._laxity import _memory_runs

Lists = tuple[list[int], list[int], list[int]]


class Pieces:
    """Local addresses, remote addresses and lengths. :meth:`take` removes bytes from the front."""

    def __init__(self, here: Sequence[int], there: Sequence[int], lengths: Sequence[int]) -> None:
        self._here = here
        self._there = there
        self._lengths = lengths
        self._at = 0
        self._offset = 0
        self.left = sum(lengths)

    @property
    def address(self) -> int:
        """Local address of the next byte."""
        return self._here[self._at] + self._offset

    def take(self, nbytes: int) -> Lists:
        """Removes and returns the next ``nbytes``."""
        here: list[int] = []
        there: list[int] = []
        lengths: list[int] = []
        left = min(nbytes, self.left)
        self.left -= left
        while left > 0:
            rest = self._lengths[self._at] - self._offset
            length = min(rest, left)
            if length > 0:
                here.append(self._here[self._at] + self._offset)
                there.append(self._there[self._at] + self._offset)
                lengths.append(length)
            left -= length
            if length == rest:
                self._at += 1
                self._offset = 0
            else:
                self._offset += length
        return here, there, lengths

    def runs(self) -> Iterator[Pieces]:
        """Splits into runs of consecutive pieces whose memory has the same layer and request, as far as is known."""
        begin = 0
        for end in _memory_runs(list(self._here)):
            part = slice(begin, end)
            run = Pieces(self._here[part], self._there[part], self._lengths[part])
            begin = end
            if run.left > 0:
                yield run
