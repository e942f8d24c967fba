"""Values that notebooks display, and that give their contents as rows or as a pandas frame."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from penstock.errors import MissingExtraError


class Displayed:
    """A value with a picture or a table of its own in notebooks, which `penstock.view.notebook` makes."""

    @abstractmethod
    def to_rows(self) -> list[dict[str, Any]]:
        """The contents as one dict of plain values per row."""
        raise NotImplementedError

    def to_pandas(self) -> Any:  # noqa: ANN401 -- pandas is optional, also for type checkers
        """The rows as a pandas `DataFrame`."""
        try:
            from pandas import DataFrame  # noqa: PLC0415 -- optional
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas() needs pandas, which is not installed: pip install pandas; "
                "to_rows() gives the same rows as dicts"
            ) from error
        return DataFrame(self.to_rows())

    def _repr_html_(self) -> str:
        from penstock.view.notebook import notebook_html  # noqa: PLC0415 -- against the import order

        return notebook_html(self)
