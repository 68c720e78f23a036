"""The checkout that is measured: its commit, and where its figures are kept."""

import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / 'results'


def commit() -> str:
    """The commit of flax_sg, with ``+`` if its files have changed; '' without git."""
    git = 'git', '-C', str(RESULTS)
    try:
        found = subprocess.check_output([*git, 'rev-parse', '--short=8', 'HEAD'])
    except (OSError, subprocess.CalledProcessError):
        return ''
    changed = subprocess.run([*git, 'diff', '--quiet', 'HEAD', '--', ':/flax_sg'])
    return found.decode().strip() + '+' * changed.returncode
