"""Reports of simulated runs: a table, pictures, and one page with both. `write_report` writes everything."""

from __future__ import annotations

from hodei.sim.report.gantt import gantt_for_terminal
from hodei.sim.report.style import why_no_pictures
from hodei.sim.report.table import draw_table
from hodei.sim.report.write import write_report

__all__ = ["draw_table", "gantt_for_terminal", "why_no_pictures", "write_report"]
