"""Tables, pictures and the page of a sweep."""

from jaxpack.report.ranking import best_row, ranked
from jaxpack.report.rungs import plot_rungs, rungs_figure
from jaxpack.report.tables import print_table, to_pandas, trials_table

__all__ = [
    "best_row",
    "plot_rungs",
    "print_table",
    "ranked",
    "rungs_figure",
    "to_pandas",
    "trials_table",
]
