"""The names that look most like one that is not there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest(pattern: str, paths: Iterable[str], n: int = 3) -> list[str]:
    """Returns the n paths that look most like a pattern, the nearest first.

    The pattern is compared with the part of each path that fits it best. So the name of
    a module finds the variables inside the module.

    >>> nearest('gl/**', ['enc/bias', 'dec/kernel', 'gln/kernel', 'gln/bias'], 2)
    ['gln/bias', 'gln/kernel']
    """
    wanted = re.sub(r'[^\w/]+', '', pattern).casefold().strip('/')
    width = wanted.count('/') + 1
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        # 'enc' means 'encoder' rather than 'dec'.
        return matcher.ratio() + text.startswith(wanted)

    def score(path: str) -> tuple[float, float]:
        names = path.casefold().strip('/').split('/')
        runs = ('/'.join(names[i : i + width]) for i in range(len(names)))
        return max(map(likeness, runs)), likeness(path.casefold())

    # A comparison takes long. Of thousands of paths, only those are compared that
    # share most pairs of letters.
    pairs = {wanted[i : i + 2] for i in range(len(wanted) - 1)}

    def shared(path: str) -> int:
        text = path.casefold()
        return sum(pair in text for pair in pairs)

    distinct = list(dict.fromkeys(paths))
    if len(distinct) > 200:
        distinct.sort(key=shared, reverse=True)
    # sorted is stable: paths that look alike stay in the order they came in.
    return sorted(distinct[:200], key=score, reverse=True)[:n]
