"""Draws the README's pictures: which loss of its model trains what, light and dark.

python docs/picture.py
"""

import os
import re
from pathlib import Path

import matplotlib

DOCS = Path(__file__).parent
README = DOCS.parent / 'README.md'
PICTURE = 'gradient_flow_{mode}.svg'


def main(folder: Path = DOCS / 'images') -> None:
    """Runs the README's program and draws the report that is made there.

    Args:
        folder: where the pictures go.
    """
    blocks = re.findall(r'^```python\n(.*?)^```$', README.read_text(), re.M | re.S)
    names: dict = {}
    while 'flow' not in names:
        exec(blocks.pop(0), names)
    folder.mkdir(exist_ok=True)
    # The same bytes at every run.
    os.environ['SOURCE_DATE_EPOCH'] = '0'
    matplotlib.rcParams['svg.hashsalt'] = 'flax_sg'
    for mode in ('light', 'dark'):
        path = folder / PICTURE.format(mode=mode)
        title = 'Which loss trains what'
        names['flow'].plot(path, depth=1, title=title, dark=mode == 'dark')


if __name__ == '__main__':
    main()
