"""How the site is built: guide and reference, from these pages and the docstrings.

Nothing is fetched and nothing is run. `tests/repository/test_readme.py` runs the code
in the pages, pytest the examples in docstrings, `dev.py notebooks --check` the
notebooks.
"""

import inspect
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

import flax_sg

logger = logging.getLogger(__name__)

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
# What autodoc makes of `filters.Where` in overloads, and of names it does not resolve.
_WHERE = (
    'Filter | str | bool | bool | Pattern[str] | Callable[[Path], bool | bool] | '
    'Mapping[str, Any] | Sequence[Any] | Set[Any]'
)
_SHORT = {
    _WHERE: 'Where',
    "TypeAliasForwardRef('Where')": 'Where',
    'filters.Derived': 'Filter',
    '[[...], ': '[..., ',
    ' | Absent = ABSENT': ' = ...',
    'Hashable = ABSENT': 'Hashable = ...',
    '<function parameters>': '...',
}
# What functions return; nobody calls the classes.
_RETURNED = ('BlockDecorator', 'GradientFlow', 'Why', 'Moves', 'Paths', 'Variable')


def show_for_users(app, what, name, obj, options, signature, returns):
    """Leaves out of a signature what users do not pass."""
    if name == 'flax_sg.linen.Frozen':
        found = inspect.signature(obj).parameters.values()
        shown = [p.replace(annotation=p.empty) for p in found]
        shown = [p for p in shown if p.name not in _NOT_FOR_USERS]
        return str(inspect.Signature(shown)), returns
    if what == 'class' and name.endswith(_RETURNED):
        return '', None
    if name == 'flax_sg.nnx.Optimizer':
        return '(model, tx, *, wrt)', None  # As Flax's own, which it passes on to.
    return signature, returns


def text_of(node):
    """The text of a node with each name once: Sphinx holds its long form, too."""
    node = node.deepcopy()
    for name in list(node.findall(addnodes.pending_xref_condition)):
        if name['condition'] != 'resolved':
            name.parent.remove(name)
    return node.astext()


def shorten(app, domain, objtype, content):
    """Writes types in signatures as the source does."""
    for node in content.parent.findall(addnodes.desc_parameter):
        short = text = text_of(node)
        for long, name in _SHORT.items():
            short = short.replace(long, name)
        if short != text:
            name, colon, rest = short.partition(':')
            node.children[:] = [addnodes.desc_sig_name(name, name)]
            node += nodes.Text(colon + rest)
            if twice := re.search(r'([A-Z]\w+)\1', node.astext()):
                logger.warning('A type is written twice: %s', twice[0])


def link_notebooks(app, docname, source):
    """Links to notebooks as the repository shows them; Sphinx follows no symlink."""
    link = r'\[([^]]+)\]\(\.\./notebooks/(\w+)\.ipynb\)'
    source[0] = re.sub(link, r'{doc}`\1 </notebooks/\2>`', source[0])


def drop_notes(app, docname, source):
    """Drops what the pages of the reference say to readers on a code host."""
    if docname.startswith('reference/'):
        source[0] = re.sub(r'^> A code host .*\n(> .*\n)*', '', source[0], flags=re.M)


def break_code(app, pagename, templatename, context, doctree):
    """Lets code in tables break between names, where a phone is narrow."""

    def table(found):
        return re.sub(r'(<span class="pre">)(.*?)(</span>)', code, found[0])

    def code(found):
        return found[1] + re.sub(r'([_./(,=])(?=\w)', r'\1<wbr>', found[2]) + found[3]

    body = context.get('body', '')
    context['body'] = re.sub(r'<table.*?</table>', table, body, flags=re.DOTALL)


def setup(app):
    """Connects the functions above."""
    app.connect('autodoc-process-signature', show_for_users)
    app.connect('source-read', link_notebooks)
    app.connect('source-read', drop_notes)
    app.connect('object-description-transform', shorten)
    app.connect('html-page-context', break_code)
