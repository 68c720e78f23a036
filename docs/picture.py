"""Draws the picture in the README: which loss of its model trains what.

python docs/picture.py
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
README = DOCS.parent / 'README.md'
PICTURE = DOCS / 'images/gradient_flow.png'


def main() -> None:
    """Runs the README's program and draws the report that is made there."""
    blocks = re.findall(r'^```python\n(.*?)^```$', README.read_text(), re.M | re.S)
    names: dict = {}
    while 'flow' not in names:
        exec(blocks.pop(0), names)
    PICTURE.parent.mkdir(exist_ok=True)
    names['flow'].plot(PICTURE, depth=1, title='Which loss trains what')


if __name__ == '__main__':
    main()
