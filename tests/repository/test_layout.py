"""How packages are laid out: one topic per file, imports one way, nothing private.

The last checks look at what is tracked: text, and small pictures of the guide.

Each check takes the folder of a package and returns the faults in it. The tests run
each check on flax_sg, and on a small package with one fault, which the check must
report.
"""

import ast
import graphlib
import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import flax.nnx
import pytest
from flax import linen
from flax.core import Scope

import flax_sg as sg
from flax_sg import filters, testing
from flax_sg import linen as nn
from flax_sg.internals import jaxprs

ROOT = Path(__file__).parents[2]
# flax_sg.nnx asks for flax 0.12.1.
HAS_NNX = hasattr(flax.nnx.Variable, 'get_value')

# Packages, each of which imports only from those before it, and the public names.
STACK = [
    *('errors', 'internals', 'filters', 'rendering', 'trees', 'rules', 'programs'),
    *('nnx', 'engine', 'scans', 'forms', 'core', 'linen', 'optim', 'autodiff', 'flow'),
    *('stored', 'ahead', 'summary', 'testing', 'demo'),
]

Check = Callable[[Path], list[str]]


def modules(package: Path) -> dict[str, ast.Module]:
    """The syntax trees of a package's files, by dotted name."""
    trees = {}
    for file in sorted(package.rglob('*.py')):
        parts = file.relative_to(package.parent).with_suffix('').parts
        name = '.'.join(part for part in parts if part != '__init__')
        trees[name] = ast.parse(file.read_text())
    return trees


def imported_names(tree: ast.AST) -> list[str]:
    """The dotted names that a file imports, at any depth in its code."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = '.' * node.level + (node.module or '')
            names += [f'{prefix}.{alias.name}' for alias in node.names]
    return names


def relative_imports(package: Path) -> list[str]:
    """Finds relative imports, since the other checks read absolute names only."""
    return [
        f'{module} imports {name}'
        for module, tree in modules(package).items()
        for name in imported_names(tree)
        if name.startswith('.')
    ]


class WithoutTypes(ast.NodeTransformer):
    """Removes code under `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        is_typing = re.match(r'(\w+\.)?TYPE_CHECKING', ast.unparse(node.test))
        return node.orelse if is_typing else node


def import_cycles(package: Path) -> list[str]:
    """Finds import cycles, also by imports inside functions.

    An import inside a function hides a cycle and does not remove it. Imports for type
    checkers do not count, since they do not run.
    """
    trees = {name: WithoutTypes().visit(t) for name, t in modules(package).items()}
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        # `from pkg.mod import name` is pkg.mod; `from pkg import mod` is pkg.mod too.
        graph[module] = {
            name if name in trees else name.rpartition('.')[0]
            for name in imported_names(tree)
            if name in trees or name.rpartition('.')[0] in trees
        }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # Rotated so that the report does not depend on the order of sets.
        cycle = error.args[1][:0:-1]
        start = cycle.index(min(cycle))
        return [' -> '.join([*cycle[start:], *cycle[: start + 1]])]
    return []


def is_private(name: str) -> bool:
    return any(re.match('_(?!_)', part) for part in name.split('.'))


def private_names(package: Path) -> list[str]:
    """Private names of Flax, JAX and others, which only internals/ may use.

    Imports, attributes that nothing of the package has, methods that take the place of
    Flax's, and names in strings.
    """
    faults = []
    trees = modules(package)
    own = {name for tree in trees.values() for name in names_defined(tree)}
    for module, tree in trees.items():
        if '.internals.' in module:
            continue
        faults += [
            f'{module} imports {name}'
            for name in imported_names(tree)
            if is_private(name) and not name.startswith(package.name)
        ]
        overrides = OVERRIDES.get(module, ())
        for node in ast.walk(tree):
            place = f'{module}:{getattr(node, "lineno", 0)}'
            if isinstance(node, ast.Attribute):
                of_others = is_private(node.attr) and node.attr not in own | OF_PYTHON
                if of_others or node.attr == 'debug_path':
                    faults.append(f'{place} reads {ast.unparse(node)}')
            elif isinstance(node, ast.ClassDef):
                methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
                faults += [
                    f'{place} has {method.name}'
                    for method in methods
                    if method.name in OF_FLAX and method.name not in overrides
                ]
            elif isinstance(node, ast.Constant) and node.value in OF_FLAX | OF_JAX:
                faults.append(f'{place} says {node.value!r}')
    return faults


def _names_of_flax() -> frozenset[str]:
    names = {*dir(Scope({})), *dir(linen.Dense(1))}
    private = filter(is_private, names)
    return frozenset({*private, 'method_handler_wrapped', 'while_loop', 'switch'})


# Names of Flax's private attributes and methods, and of its transforms.
OF_FLAX = _names_of_flax()
# Primitives and equation parameters, whose names differ between versions.
OF_JAX = (jaxprs.CALLS | jaxprs.CUSTOM_CALLS) - {'jit', 'shard_map', 'checkpoint'}
OF_JAX |= {'call_jaxpr', 'fun_jaxpr', 'num_consts', 'num_carry', 'ft_in', '_prim'}
OF_PYTHON = frozenset(['_asdict', '_fields', '_replace', '_getframe'])
# Methods of Flax that a module replaces, where that is its task.
OVERRIDES = {
    'flax_sg.forms.wrappers': (
        *('_call_wrapped_method', '_register_submodules'),
        *('_try_setup', '_validate_setup'),
    )
}


def names_defined(tree: ast.Module) -> set[str]:
    """The functions, classes, variables and attributes that a file makes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            of_self = isinstance(node, ast.Name) or ast.unparse(node.value) == 'self'
            names |= {name} if isinstance(node.ctx, ast.Store) and of_self else set()
    return names


def long_files(package: Path) -> list[str]:
    counts = {
        file.relative_to(package).as_posix(): len(file.read_text().splitlines())
        for file in sorted(package.rglob('*.py'))
    }
    return [
        f'{name} has {count} lines' for name, count in counts.items() if count > 500
    ]


def upward_imports(package: Path) -> list[str]:
    """Finds upward imports, also for type checkers: a reader follows them too."""
    faults = []
    for module, tree in modules(package).items():
        room = module.split('.')[1] if '.' in module else ''
        if room not in STACK:
            continue
        for name in imported_names(tree):
            own, _, rest = name.partition('.')
            other = rest.split('.')[0]
            if own != package.name or other == room:
                continue
            if other not in STACK or STACK.index(other) > STACK.index(room):
                faults.append(f'{module} imports {name}')
    return faults


def modules_at_top(package: Path) -> list[str]:
    """Four: the public names, and what `python -m` runs. Packages stand in STACK."""
    found = sorted(path.name for path in package.glob('*.py'))
    rooms = {path.parent.name for path in package.glob('*/__init__.py')}
    return ([f'at the top: {", ".join(found)}'] if len(found) > 4 else []) + [
        f'{name}/ is not in the stack' for name in sorted(rooms - set(STACK))
    ]


def hidden_modules(package: Path) -> list[str]:
    """Modules whose package has another thing of this name: mypy takes the module."""
    trees = modules(package)
    return [
        f'{room}.{alias.asname or alias.name} is a module, too'
        for room, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != room
        for alias in node.names
        if f'{room}.{alias.asname or alias.name}' in trees
    ]


TYPING = 'TYPE_CHECKING'
# Each check with a faulty file, and the report that the check must give.
CHECKS: list[tuple[Check, str, str, str]] = [
    (relative_imports, 'a.py', 'from . import b', 'pkg.a imports ..b'),
    (import_cycles, 'b.py', 'def f():\n    from pkg.a import x', 'pkg.a -> pkg.b'),
    (import_cycles, 'b.py', f'if not {TYPING}:\n import pkg.a', 'pkg.a -> pkg.b'),
    (import_cycles, 'b.py', 'from pkg import a', 'pkg.a -> pkg.b -> pkg.a'),
    (private_names, 'a.py', 'from jax._src import core', 'pkg.a imports jax._src.core'),
    (private_names, 'a.py', 'import jax\njax._src.core', 'pkg.a:2 reads jax._src'),
    (private_names, 'a.py', 'from flax.core import Scope as S\nS._x()', 'reads S._x'),
    (private_names, 'a.py', 'def f(scope):\n    scope._x', 'pkg.a:2 reads scope._x'),
    (private_names, 'a.py', 'class M:\n def _try_setup(self): 0', 'has _try_setup'),
    (private_names, 'a.py', 'def f(m): m.scope.debug_path', 'm.scope.debug_path'),
    (private_names, 'a.py', 'x = ("_state",)', "pkg.a:1 says '_state'"),
    (private_names, 'a.py', 'y = eqn.params["call_jaxpr"]', "says 'call_jaxpr'"),
    (private_names, 'a.py', 'if name == "remat2": ...', "pkg.a:1 says 'remat2'"),
    (long_files, 'a.py', '\n' * 501, 'a.py has 501 lines'),
    (upward_imports, 'errors/a.py', 'from pkg import filters', 'pkg.filters'),
    (upward_imports, 'rules/a.py', 'from pkg.engine.x import y', 'pkg.engine.x.y'),
    (upward_imports, 'trees/a.py', f'if {TYPING}:\n import pkg.rules.x', 'pkg.rules.x'),
    (hidden_modules, '__init__.py', 'from pkg.a import b as a', 'pkg.a is a module'),
    (modules_at_top, 'c.py', '', 'at the top: __init__.py'),
    (modules_at_top, 'sub/__init__.py', '', 'sub/ is not in the stack'),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package without a fault, in which a imports b."""
    files = {
        'pkg/__init__.py': '',
        'pkg/a.py': 'import sys\nfrom pkg import b\nfrom pkg.b import f\nsys._getframe',
        'pkg/b.py': 'if TYPE_CHECKING:\n    import pkg.a\ndef f(): ...\n',
        'pkg/internals/a.py': 'from jax._src import core\n\ncore._x\n',
        'pkg/linen.py': '',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / 'pkg'


every_check = pytest.mark.parametrize(
    'check', dict.fromkeys(check for check, *_ in CHECKS), ids=lambda c: c.__name__
)


# Those that hold for the benchmarks, too.
FOR_ALL = relative_imports, import_cycles, private_names, long_files


@every_check
def test_flax_sg_has_no_fault(check: Check):
    for folder in ['flax_sg', *['benchmarks'] * (check in FOR_ALL)]:
        assert check(ROOT / folder) == []


@every_check
def test_a_faultless_package_passes(check: Check, package: Path):
    assert check(package) == []


@pytest.mark.parametrize(('check', 'file', 'text', 'said'), CHECKS)
def test_a_fault_is_reported(check: Check, file: str, text: str, said: str, package):
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(text)
    faults = check(package)
    assert any(said in fault for fault in faults), faults


def own_names(module: ModuleType, of_flax: ModuleType | None) -> set[str]:
    """The public functions and classes of a module, without those of Flax."""
    public = {n: getattr(module, n) for n in dir(module) if not n.startswith('_')}
    ours = {n for n, value in public.items() if value is not getattr(of_flax, n, None)}
    return {n for n in ours if not isinstance(public[n], ModuleType)}


PUBLIC: list[tuple[str, ModuleType, ModuleType | None]] = [
    *(('sg', sg, None), ('filters', filters, None), ('testing', testing, None)),
    ('nn', nn, linen),
]
if HAS_NNX:
    PUBLIC.append(('nnx', importlib.import_module('flax_sg.nnx'), flax.nnx))


@pytest.mark.parametrize(('called', 'module', 'of_flax'), PUBLIC)
def test_type_checkers_see_every_public_name(
    called: str, module: ModuleType, of_flax: ModuleType | None
):
    program = ast.parse((ROOT / 'tests' / 'typed.py').read_text())
    used = {
        node.attr
        for node in ast.walk(program)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == called
    }
    assert own_names(module, of_flax) <= used


# What stands at the top of the repository.
TOP = {
    *('flax_sg', 'tests', 'docs', 'notebooks', 'benchmarks'),
    *('.ci', '.github', '.gitignore', '.pre-commit-config.yaml'),
    *('README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md'),
    *('LICENSE', 'CITATION.cff', 'pyproject.toml', 'dev.py', 'conftest.py'),
}


def untidy(folder: Path, files: list[str]) -> list[str]:
    """Finds tracked files that do not belong: no text, or at the top and not in TOP.

    Pictures, of at most 300 kB, are in docs/images; what makes a picture of figures
    keeps it beside them, as text.
    """
    faults = [
        f'{name} is at the top' for name in {n.split('/')[0] for n in files} - TOP
    ]
    for name in files:
        data = (folder / name).read_bytes() if (folder / name).is_file() else b''
        is_picture = name.startswith('docs/images/')
        if len(data) > 300_000:
            faults.append(f'{name} has {len(data):,} bytes')
        if not is_picture and b'\0' in data:
            faults.append(f'{name} is no text')
    return faults


@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='an sdist has no history')
def test_what_is_tracked_is_text_and_small_pictures():
    listed = subprocess.check_output(['git', 'ls-files', '-z'], cwd=ROOT, text=True)
    assert untidy(ROOT, listed.rstrip('\0').split('\0')) == []


def test_a_file_that_does_not_belong_is_reported(tmp_path: Path):
    data = {
        'README.md': b'A text.',
        'docs/images/small.png': b'\0',
        'docs/images/large.png': bytes(300_001),
        'docs/data.npz': b'PK\0',
        'pillow.whl': b'PK\0',
    }
    for name, content in data.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert untidy(tmp_path, list(data)) == [
        'pillow.whl is at the top',
        'docs/images/large.png has 300,001 bytes',
        'docs/data.npz is no text',
        'pillow.whl is no text',
    ]
