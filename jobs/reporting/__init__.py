"""The HTML report: what it reads, its sections, plots and pages."""
