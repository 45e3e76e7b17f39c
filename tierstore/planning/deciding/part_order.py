"""Which parts of a model a program calls one after another, and what each uses.

An encoder is called once and a decoder many times, or every layer after the one before.  What a part has used
is used again when it is called again: who plans for one call has to know which others come before that.

1. After a part comes what came after it most often; among equals, what did last.  What was long ago counts
   less and less, so that a program that changes its ways is followed.
2. So one part follows another until one comes again, which is expected once more.  All others come after
   that, what was called longest ago first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

_REMEMBERED = 16  # calls after a part, at which all of them count half


class PartOrder:
    """What is known of the parts that a program calls, of which the whole model may be one."""

    def __init__(self) -> None:
        self._accesses: dict[
            Hashable, tuple[str, ...]
        ] = {}  # of its last call, what was called last at the end
        self._followers: dict[Hashable, dict[Hashable, int]] = {}  # how often each came after it, likewise

    def note(self, part: Hashable, accesses: tuple[str, ...], following: Hashable) -> bool:
        """Take in a call that has ended.

        Args:
            part: that was called.
            accesses: the keys that it used, in their order; none: it may have ended early.
            following: what is called now.

        Returns:
            whether something else is expected than before.
        """
        former = self._accesses.pop(part, None)
        self._accesses[part] = accesses or former or ()
        followers = self._followers.setdefault(part, {})
        expected = self._follower_of(part)
        followers[following] = followers.pop(following, 0) + 1
        if sum(followers.values()) > _REMEMBERED:
            self._followers[part] = {each: count // 2 for each, count in followers.items() if count > 1}
        return self._accesses[part] != former or self._follower_of(part) != expected

    def __contains__(self, part: Hashable) -> bool:
        return part in self._accesses

    def accesses(self, part: Hashable) -> tuple[str, ...]:
        """Return what a known part uses."""
        return self._accesses[part]

    def comes_again(self, part: Hashable) -> bool:
        """Say whether what mostly comes after a part is the part itself."""
        return part in self._followers and self._follower_of(part) is part

    def expected(self, part: Hashable) -> Sequence[Hashable]:
        """Return what is called from a known part on, that first, until it comes again."""
        chain: dict[Hashable, None] = {part: None}
        following = self._follower_of(part)
        while following in self._accesses and following not in chain:
            chain[following] = None
            following = self._follower_of(following)
        others = [each for each in self._accesses if each not in chain]
        is_cycle = following is part and not others
        again = [following] if following in chain and not is_cycle else []
        return [*chain, *again, *others]

    def _follower_of(self, part: Hashable) -> Hashable:
        followers: Iterable[tuple[Hashable, int]] = reversed(self._followers.get(part, {}).items())
        return max(followers, key=lambda found: found[1], default=(None, 0))[0]
