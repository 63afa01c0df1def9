"""Reports: one value made from a plan or gate result, rendered as text, JSON, markdown or CI lines.

Renderers return text; only the command line prints.
"""

from offplan.report.analyze import AnalyzeReport, Timing, analyze_report, render_analyze
from offplan.report.gate import GATE_FORMATS, render_gate

__all__ = [
    "GATE_FORMATS",
    "AnalyzeReport",
    "Timing",
    "analyze_report",
    "render_analyze",
    "render_gate",
]
