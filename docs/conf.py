"""How the site is built: guide and reference, from these pages and the docstrings.

Nothing is fetched and nothing is run. `tests/repository/test_readme.py` runs the code
in the pages, pytest the examples in docstrings, `dev.py notebooks` the notebooks.
"""

import flax_sg

project = 'flax_sg'
author = 'The flax_sg authors'
version = release = flax_sg.__version__

extensions = ['sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'myst_nb']
exclude_patterns = ['_build', 'jupyter_execute', 'notebooks/README.md']
# Names of our own have to resolve. Those of Flax and JAX are in other sites, which are
# not looked up.
nitpick_ignore_regex = [(r'py:.*', r'(?!flax_sg\b).*')]

myst_enable_extensions = ['colon_fence']
myst_heading_anchors = 3
nb_execution_mode = 'off'

autodoc_member_order = 'bysource'
# What each argument takes is said in words, which is more than the types say.
autodoc_typehints = 'none'
napoleon_attr_annotations = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = 'furo'
html_title = f'flax_sg {version}'
html_static_path = ['_static']
html_css_files = ['tables.css']
html_show_sourcelink = False
html_show_copyright = False
