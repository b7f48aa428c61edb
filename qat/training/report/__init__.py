"""Report of a run: figures, findings, and a page with both."""
