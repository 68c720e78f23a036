"""How the site is built: guide and reference, from these pages and the docstrings.

Nothing is fetched and nothing is run. `tests/repository/test_readme.py` runs the code
in the pages, pytest the examples in docstrings, `dev.py notebooks --check` the
notebooks.
"""

import inspect
import re

import flax_sg

project = 'flax_sg'
author = 'The flax_sg authors'
version = release = flax_sg.__version__

extensions = [
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx_copybutton',
    'myst_nb',
]
exclude_patterns = ['_build', 'jupyter_execute', 'notebooks/README.md']
# Names of our own have to resolve, apart from names that signatures take from private
# modules. Names of Flax and JAX are in other sites, which are not looked up.
nitpick_ignore_regex = [
    (r'py:.*', r'(?!flax_sg\b).*'),
    (r'py:(class|data|obj)', r'flax_sg\.(rules|forms|flow|optim|summary|trees)\..*'),
    (r'py:(class|data|obj)', r'flax_sg\.\w+\.\w+\..*'),
]

myst_enable_extensions = ['colon_fence']
myst_heading_anchors = 3
nb_execution_mode = 'off'

autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_type_aliases = {
    'Where': 'Where',
    'filters.Where': 'Where',
    'CollectionFilter': 'CollectionFilter',
    'Layers': 'Layers',
    'Argnums': 'Argnums',
}
maximum_signature_line_length = 60
python_use_unqualified_type_names = True
autosummary_generate = False
napoleon_attr_annotations = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Copy the program of a session, without prompts and results.
copybutton_prompt_text = r'>>> |\.\.\. '
copybutton_prompt_is_regexp = True

html_theme = 'furo'
html_title = f'flax_sg {version}'
html_static_path = ['_static']
html_css_files = ['tables.css']
html_show_sourcelink = False
html_show_copyright = False

# Arguments of wrappers that `rewrite(module)` and Flax fill in.
_NOT_FOR_USERS = {'rule', 'within', 'parent'}


def show_for_users(app, what, name, obj, options, signature, return_annotation):
    """Leaves out of a signature what users do not pass."""
    if name == 'flax_sg.linen.Frozen':
        found = inspect.signature(obj)
        shown = [p for p in found.parameters.values() if p.name not in _NOT_FOR_USERS]
        shown = [p.replace(annotation=inspect.Parameter.empty) for p in shown]
        signature = str(inspect.Signature(shown))
    if name == 'flax_sg.TrainState':
        signature, return_annotation = '(**fields)', None
    if signature:
        signature = re.sub(r'<function (\w+) at 0x\w+>', r'\1', signature)
    return signature, return_annotation


def setup(app):
    """Connects the function above."""
    app.connect('autodoc-process-signature', show_for_users)
