"""What a run shows: its curves and what was lost where, as pictures and as one page."""
