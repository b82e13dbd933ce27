"""Reports of simulated runs: a table, pictures, and one page that holds both.

`write_report` is the way in; `draw_table` and `gantt_for_terminal` are for a quick look. Numbers come from `numbers`,
sums over time from `columns` and `fairness`, positions of bars from `lanes`; drawing is in `pictures` and `gantt`, the
page in `page`.
"""

from __future__ import annotations

from hodei.sim.report.style import why_no_pictures
from hodei.sim.report.table import draw_table
from hodei.sim.report.write import gantt_for_terminal, write_report

__all__ = ["draw_table", "gantt_for_terminal", "why_no_pictures", "write_report"]
