"""The base of all reports: plain data that prints as text, and shows as tables in a notebook."""

import dataclasses
import json
import reprlib
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from darelib.core.text import ConfigError, DareError, table


class Table(NamedTuple):
    """Rows of cells, the titles first; texts: the columns that begin at the left."""

    rows: list[list[str]]
    texts: Collection[int] = (0,)

    def __str__(self) -> str:
        return table(self.rows, self.texts)

    def to_html(self) -> str:
        import html  # only notebooks need it, and --help starts sooner

        lines = []
        for k, row in enumerate(self.rows):
            tag = "td" if k else "th"
            cells = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(lines)}</table>"


Section: TypeAlias = str | Table  # of a report, as lines


@dataclasses.dataclass(frozen=True)
class Report:
    """What a command gives. Prints as text; to_dict gives plain data, to_dataframe its main table.

    A child gives its parts, or its own __str__.
    """

    # Which entry of its data has the rows of a data frame; none: all of it is one row.
    ROWS: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        # Otherwise dataclasses make one that shows everything, which may be megabytes.
        cls.__repr__ = Report.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {
            name: value for name, value in values.items() if isinstance(value, str | int | float)
        }
        shown = (f"{name}={reprlib.repr(value)}" for name, value in plain.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts()))

    def parts(self) -> list[Section]:
        return [str(self)]

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def as_dict(self, **options: Any) -> dict[str, Any]:
        """The same as to_dict."""
        return self.to_dict(**options)

    def list_rows(self) -> list[dict[str, Any]]:
        data = self.to_dict()
        return data[self.ROWS] if self.ROWS else [data]

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame of the models, tensors or trials that this is about."""
        try:
            import pandas
        except ImportError:
            raise DareError(
                "a data frame needs pandas",
                f"install it: {sys.executable} -m pip install pandas; to_dict() gives plain data",
            ) from None
        return pandas.json_normalize(self.list_rows())

    def plot(self, path: str | Path) -> None:
        """Draw it, to a .png, .svg or .pdf file."""
        raise ConfigError(f"a {type(self).__name__} has no picture", "print it")

    def _repr_html_(self) -> str:
        return "\n".join(self._list_html())

    def _list_html(self) -> Iterator[str]:
        import base64
        import html
        import tempfile

        for is_table, parts in groupby(self.parts(), lambda part: isinstance(part, Table)):
            if is_table:
                yield from (part.to_html() for part in parts if isinstance(part, Table))
            else:
                lines = "\n".join(map(str, parts)).strip("\n")
                yield f"<pre>{html.escape(lines)}</pre>"
        # The picture, if there is one, and matplotlib.
        with tempfile.TemporaryDirectory() as folder, suppress(ConfigError):
            picture = Path(folder) / "picture.png"
            self.plot(picture)
            data = base64.b64encode(picture.read_bytes()).decode()
            yield f'<img src="data:image/png;base64,{data}">'
