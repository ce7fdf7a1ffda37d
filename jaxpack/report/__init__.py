"""Tables, pictures and the page of a sweep."""

from jaxpack.report.configurations import by_configuration
from jaxpack.report.curves import curves_figure
from jaxpack.report.hparams import hparams_figure, parallel_figure
from jaxpack.report.page import card, pictures, write
from jaxpack.report.ranking import best_row, ranked, scored
from jaxpack.report.rungs import plot_rungs, rungs_figure
from jaxpack.report.style import to_svg
from jaxpack.report.summary import Summary
from jaxpack.report.tables import print_table, to_pandas, trials_table
from jaxpack.report.work import time_split, work_figure

__all__ = [
    "Summary",
    "best_row",
    "by_configuration",
    "card",
    "curves_figure",
    "hparams_figure",
    "parallel_figure",
    "pictures",
    "plot_rungs",
    "print_table",
    "ranked",
    "rungs_figure",
    "scored",
    "time_split",
    "to_pandas",
    "to_svg",
    "trials_table",
    "work_figure",
    "write",
]
