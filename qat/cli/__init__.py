"""Command line `python -m qat VERB RUN ...`: a file for each verb.

`runs.py` opens what RUN names.
"""
