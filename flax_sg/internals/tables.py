"""Private names of ``nn.tabulate``."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax.linen import summary

from flax_sg.internals import modules, tracing, versions


def _call(name: str, *args: Any) -> Any:
    return versions.call('sg.tabulate', summary, name, *args)


def module_rows(
    module: modules.Module, show_repeated: bool, *args: Any, **kwargs: Any
) -> summary.Table:
    """The rows of ``nn.tabulate``, which returns text only, without flops.

    Flax notes the calls of modules while it traces them: not those in a function of
    ``nn.jit`` that has been traced before.
    """
    make = _call('_get_module_table', module, None, show_repeated, False, False)
    with tracing.traced_anew():
        return make(*args, **kwargs)


def written_as_text(cls: type[str]) -> None:
    """Lets the YAML in the cells of ``nn.tabulate`` have keys of a class of str."""
    yaml: Any = getattr(summary, 'yaml', None)
    if yaml is not None:  # Asked when flax_sg is imported.
        yaml.SafeDumper.add_representer(cls, yaml.SafeDumper.represent_str)


def render_rows(
    table: summary.Table,
    console_kwargs: Mapping[str, Any] | None,
    table_kwargs: Mapping[str, Any],
    column_kwargs: Mapping[str, Any],
    columns: list[str],
) -> str:
    """What ``nn.tabulate`` makes of rows: columns are attributes of a row, by name."""
    options = (table_kwargs, column_kwargs, columns)
    return _call('_render_table', table, console_kwargs, *options)


def render_with(renderable: Any, console_kwargs: Mapping[str, Any] | None) -> str:
    """Text of something that rich prints, with the settings of ``nn.tabulate``."""
    settings = {'force_terminal': True, 'force_jupyter': False}
    return _call('_get_rich_repr', renderable, {**settings, **(console_kwargs or {})})


def size_text(count: int, size: int) -> str:
    """How ``nn.tabulate`` writes a number of values and their bytes, for rich."""
    return _call('_size_and_bytes_repr', count, size)
